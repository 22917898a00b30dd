from pathlib import Path

import pytest
from starlette.datastructures import Headers

from pdserve.errors import ConfigError
from pdserve.frontend.answer import HttpError
from pdserve.frontend.auth import ApiKey, ApiKeys, load_keys


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
        ("/metrics", None, None, True),
    ],
)
def test_keys(path: str, authorization: str | None, x_api_key: str | None, allowed: bool) -> None:
    given = {"authorization": authorization, "x-api-key": x_api_key}
    headers = Headers({name: value for name, value in given.items() if value is not None})
    assert allows(ApiKeys([ApiKey.of("one"), ApiKey.of("two")]), path, headers) is allowed


def test_without_keys_every_request_is_allowed() -> None:
    assert ApiKeys().find("/v1/models", {}) is None


def test_keys_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\nbeta\n")
    assert allows(load_keys({"PDSERVE_API_KEYS": " a, b "}), "/x", bearer("b"))
    assert allows(load_keys({"PDSERVE_API_KEYS": f"@{file}"}), "/x", bearer("beta"))
    assert not allows(load_keys({"PDSERVE_API_KEYS": f"@{file}"}), "/x", bearer("# ours"))
    assert allows(load_keys({}), "/x", Headers())
    assert allows(load_keys({"PDSERVE_API_KEYS": ""}), "/x", Headers())


@pytest.mark.parametrize("content", [None, "", "# only a comment\n"])
def test_a_key_file_without_keys_opens_nothing(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="PDSERVE_API_KEYS"):
        load_keys({"PDSERVE_API_KEYS": f"@{file}"})


@pytest.mark.parametrize("value", [",", " ", " , ,", "\t"])
def test_a_variable_without_keys_opens_nothing(value: str) -> None:
    with pytest.raises(ConfigError, match="PDSERVE_API_KEYS"):
        load_keys({"PDSERVE_API_KEYS": value})


def test_a_key_without_a_name_is_called_by_its_digest() -> None:
    keys = ApiKeys([ApiKey.of("one"), ApiKey.of("two", "alice")])
    one, two = keys.find("/x", bearer("one")), keys.find("/x", Headers({"x-api-key": "two"}))
    assert one
    assert two
    assert (one.name, two.name) == ("key-7692c3ad3540", "alice")
