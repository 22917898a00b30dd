from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.frontend.auth import ApiKeys, load_keys


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
    assert ApiKeys(["one", "two"]).allow(path, authorization, x_api_key) is allowed


def test_no_keys_no_door() -> None:
    assert ApiKeys().allow("/v1/models", None)


def test_keys_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\nbeta\n")
    assert load_keys({"PDSERVE_API_KEYS": " a, b "}).allow("/x", "Bearer b")
    assert load_keys({"PDSERVE_API_KEYS": f"@{file}"}).allow("/x", "Bearer beta")
    assert not load_keys({"PDSERVE_API_KEYS": f"@{file}"}).allow("/x", "Bearer # ours")
    assert load_keys({}).allow("/x", None)
    assert load_keys({"PDSERVE_API_KEYS": ""}).allow("/x", None)


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
def test_who_is_the_same_client(keys: list[str], authorization: str, address: str, same: bool) -> None:
    known = ApiKeys(keys)
    who = known.who("Bearer one", None, "10.0.0.1")
    assert (known.who(authorization, None, address) == who) is same
    assert "one" not in who
    assert not keys or known.who(None, "one", "10.0.0.3") == who
