import logging
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from pdserve.config.api_keys import ApiKey, FoundKeys, read_keys
from pdserve.frontend.edge.response import HttpError
from pdserve.frontend.keys import auth
from pdserve.frontend.keys.auth import ApiKeys, KeySource
from pdserve.runtime.tasks import TaskOwner
from pdserve.util.errors import ConfigError
from tests.conditions import until


def name(keys: ApiKeys, headers: Mapping[str, str]) -> str:
    """Return the name of the request's key; empty for a 401."""
    try:
        key = keys.find(Headers(headers))
    except HttpError as error:
        return "" if error.status == 401 else str(error)
    assert key is not None
    return key.name


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "found"),
    [
        ("Bearer one", "", "key-7692c3ad3540"),
        ("bearer two", "", "alice"),
        ("", "two", "alice"),
        ("Bearer three", "", ""),
        ("Basic one", "", ""),
        ("Bearer ", "", ""),
        ("", "", ""),
    ],
)
def test_a_key_is_found_by_what_clients_send(authorization: str, x_api_key: str, found: str) -> None:
    """A key without a name is named by its digest."""
    given = {"authorization": authorization, "x-api-key": x_api_key}
    headers = {name: value for name, value in given.items() if value}
    assert name(ApiKeys([ApiKey.of("one"), ApiKey.of("two", "alice")]), headers) == found


async def test_a_key_file_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auth, "CHECK", 0.01)
    file = tmp_path / "keys"
    write(file, "alice=alice-0123456789abc\nbob=bob-0123456789abcdef\n")
    source = KeySource(file, {})
    alice, bob = ({"x-api-key": key} for key in ("alice-0123456789abc", "bob-0123456789abcdef"))
    assert name(source.keys, alice) == "alice"
    async with TaskOwner() as tasks:
        tasks.forever(source.follow, "keys")
        write(file, "bob=bob-0123456789abcdef\n")
        await until(lambda: not name(source.keys, alice))
        assert name(source.keys, bob) == "bob"
        write(file, "bob=bob-0123456789abcdef\nbob: {\n")
        await until(lambda: len(errors(caplog)) == 1)
        file.unlink()
        await until(lambda: len(errors(caplog)) == 2)
        assert all(error.startswith("cannot load the new API keys") for error in errors(caplog))
        assert name(source.keys, bob) == "bob"
        write(file, "alice=alice-0123456789abc\n")
        await until(lambda: name(source.keys, alice) == "alice")
        assert not name(source.keys, bob)


async def test_a_key_file_that_could_not_be_read_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auth, "CHECK", 0.01)
    file, alice = tmp_path / "keys", {"x-api-key": "alice-0123456789abc"}
    write(file, "alice=alice-0123456789abc\nbob=bob-0123456789abcdef\n")
    source, tries = KeySource(file, {}), list[Path | None]()

    def unreadable(path: Path | None, env: Mapping[str, str]) -> FoundKeys:
        tries.append(path)
        raise ConfigError(["not readable yet"])

    monkeypatch.setattr(auth, "read_keys", unreadable)
    async with TaskOwner() as tasks:
        tasks.forever(source.follow, "keys")
        write(file, "bob=bob-0123456789abcdef\n")
        await until(lambda: len(tries) > 2)
        assert (name(source.keys, alice), len(errors(caplog))) == ("alice", 1)
        monkeypatch.setattr(auth, "read_keys", read_keys)
        await until(lambda: not name(source.keys, alice))


def write(file: Path, text: str) -> None:
    """Replace the file atomically, as administrators should."""
    fresh = file.with_suffix(".new")
    fresh.touch(0o600)
    fresh.write_text(text)
    os.replace(fresh, file)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
