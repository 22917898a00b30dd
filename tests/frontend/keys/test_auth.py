import logging
import os
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from pdserve.config.api_keys import ApiKey
from pdserve.frontend.edge.answer import HttpError
from pdserve.frontend.keys import auth
from pdserve.frontend.keys.auth import ApiKeys, KeySource
from pdserve.tasks import Owner
from tests.conditions import until


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


def allows(keys: ApiKeys, path: str, headers: Headers) -> bool:
    try:
        keys.find(path, headers)
    except HttpError as error:
        return error.status != 401
    return True


@pytest.mark.parametrize(
    ("path", "authorization", "x_api_key", "allowed"),
    [
        ("/v1/models", "Bearer one", None, True),
        ("/v1/models", "bearer two", None, True),
        ("/v1/models", None, "two", True),
        ("/v1/models", "Bearer three", None, False),
        ("/v1/models", "Basic one", None, False),
        ("/v1/models", "Bearer ", None, False),
        ("/v1/models", None, None, False),
        ("/tokenize", None, None, False),
        ("/health", None, None, True),
        ("/metrics", None, None, False),
    ],
)
def test_keys(path: str, authorization: str | None, x_api_key: str | None, allowed: bool) -> None:
    given = {"authorization": authorization, "x-api-key": x_api_key}
    headers = Headers({name: value for name, value in given.items() if value is not None})
    assert allows(ApiKeys([ApiKey.of("one"), ApiKey.of("two")]), path, headers) is allowed


def test_without_keys_every_request_is_allowed() -> None:
    assert ApiKeys().find("/v1/models", {}) is None


def test_a_key_without_a_name_is_called_by_its_digest() -> None:
    keys = ApiKeys([ApiKey.of("one"), ApiKey.of("two", "alice")])
    one, two = keys.find("/x", bearer("one")), keys.find("/x", Headers({"x-api-key": "two"}))
    assert one
    assert two
    assert (one.name, two.name) == ("key-7692c3ad3540", "alice")


async def test_a_file_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auth, "CHECK", 0.01)
    file = tmp_path / "keys"
    write(file, "alice=alice-0123456789abc\nbob=bob-0123456789abcdef\n")
    source = KeySource(file, {})
    alice, bob = bearer("alice-0123456789abc"), bearer("bob-0123456789abcdef")
    assert allows(source.keys, "/x", alice)
    async with Owner() as tasks:
        tasks.forever(source.follow, "keys")
        write(file, "bob=bob-0123456789abcdef\n")
        await until(lambda: not allows(source.keys, "/x", alice))
        assert allows(source.keys, "/x", bob)
        write(file, "bob=bob-0123456789abcdef\nbob: {\n")
        await until(lambda: len(errors(caplog)) == 1)
        file.unlink()
        await until(lambda: len(errors(caplog)) == 2)
        assert all(error.startswith("the API keys of before stay") for error in errors(caplog))
        assert allows(source.keys, "/x", bob)
        write(file, "alice=alice-0123456789abc\n")
        await until(lambda: allows(source.keys, "/x", alice))
        assert not allows(source.keys, "/x", bob)


def write(file: Path, text: str) -> None:
    """As an administrator should: the file is never there by half."""
    fresh = file.with_suffix(".new")
    fresh.touch(0o600)
    fresh.write_text(text)
    os.replace(fresh, file)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
