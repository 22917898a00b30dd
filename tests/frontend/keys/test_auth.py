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


def allows(keys: ApiKeys, headers: Headers) -> bool:
    try:
        keys.find(headers)
    except HttpError as error:
        return error.status != 401
    return True


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "allowed"),
    [
        ("Bearer one", None, True),
        ("bearer two", None, True),
        (None, "two", True),
        ("Bearer three", None, False),
        ("Basic one", None, False),
        ("Bearer ", None, False),
        (None, None, False),
    ],
)
def test_keys(authorization: str | None, x_api_key: str | None, allowed: bool) -> None:
    given = {"authorization": authorization, "x-api-key": x_api_key}
    headers = Headers({name: value for name, value in given.items() if value is not None})
    assert allows(ApiKeys([ApiKey.of("one"), ApiKey.of("two")]), headers) is allowed


def test_without_keys_every_request_is_allowed() -> None:
    assert ApiKeys().find({}) is None


def test_a_key_without_a_name_is_called_by_its_digest() -> None:
    keys = ApiKeys([ApiKey.of("one"), ApiKey.of("two", "alice")])
    one, two = keys.find(bearer("one")), keys.find(Headers({"x-api-key": "two"}))
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
    assert allows(source.keys, alice)
    async with Owner() as tasks:
        tasks.forever(source.follow, "keys")
        write(file, "bob=bob-0123456789abcdef\n")
        await until(lambda: not allows(source.keys, alice))
        assert allows(source.keys, bob)
        write(file, "bob=bob-0123456789abcdef\nbob: {\n")
        await until(lambda: len(errors(caplog)) == 1)
        file.unlink()
        await until(lambda: len(errors(caplog)) == 2)
        assert all(error.startswith("the API keys of before stay") for error in errors(caplog))
        assert allows(source.keys, bob)
        write(file, "alice=alice-0123456789abc\n")
        await until(lambda: allows(source.keys, alice))
        assert not allows(source.keys, bob)


def write(file: Path, text: str) -> None:
    """As an administrator should: the file is never there by half."""
    fresh = file.with_suffix(".new")
    fresh.touch(0o600)
    fresh.write_text(text)
    os.replace(fresh, file)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
