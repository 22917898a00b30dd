from pathlib import Path

import pytest
from starlette.datastructures import Headers

from pdserve.errors import ConfigError
from pdserve.frontend.auth import ApiKeys, load_keys


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


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
    assert ApiKeys(["one", "two"]).allow(path, headers) is allowed


def test_without_keys_every_request_is_allowed() -> None:
    assert ApiKeys().allow("/v1/models", {})


def test_keys_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\nbeta\n")
    assert load_keys({"PDSERVE_API_KEYS": " a, b "}).allow("/x", bearer("b"))
    assert load_keys({"PDSERVE_API_KEYS": f"@{file}"}).allow("/x", bearer("beta"))
    assert not load_keys({"PDSERVE_API_KEYS": f"@{file}"}).allow("/x", bearer("# ours"))
    assert load_keys({}).allow("/x", {})
    assert load_keys({"PDSERVE_API_KEYS": ""}).allow("/x", {})


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


@pytest.mark.parametrize(
    ("keys", "authorization", "address", "same"),
    [
        (["one", "two"], "Bearer one", "10.0.0.2", True),
        (["one", "two"], "Bearer two", "10.0.0.1", False),
        ([], "Bearer two", "10.0.0.1", True),
        ([], "Bearer one", "10.0.0.2", False),
    ],
)
def test_which_requests_are_of_one_client(
    keys: list[str], authorization: str, address: str, same: bool
) -> None:
    known = ApiKeys(keys)
    client = known.client(bearer("one"), "10.0.0.1")
    assert (known.client(Headers({"authorization": authorization}), address) == client) is same
    assert "one" not in client
    assert not keys or known.client(Headers({"x-api-key": "one"}), "10.0.0.3") == client
