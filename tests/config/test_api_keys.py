import hashlib
from pathlib import Path

import pytest

from pdserve.config.api_keys import ApiKey, KeyLimits, read_keys, requires_key
from pdserve.config.schema import SecuritySection
from pdserve.util.errors import ConfigError

LONG = "sk-0123456789abcdef"
OTHER = "sk-fedcba9876543210"
HASH = hashlib.sha256(OTHER.encode()).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.yaml"
    file.touch(0o600)
    return file


def test_a_file_of_named_keys_is_read(file: Path) -> None:
    file.write_text(
        f"alice:\n  key: {LONG}\n  requests-per-minute: 60\n  concurrent-requests: 8\n"
        f"bob@example.org: {{key-sha256: {HASH}, tokens-per-minute: 100000, admin: true}}\n"
    )
    found = read_keys(file, {})
    assert found.keys == [
        ApiKey.of(LONG, "alice", KeyLimits(requests_per_minute=60, concurrent_requests=8)),
        ApiKey.of(OTHER, "bob@example.org", KeyLimits(tokens_per_minute=100_000), admin=True),
    ]
    assert (found.files, found.notes) == ([file], [])


def test_a_file_with_a_key_per_line_is_read(file: Path) -> None:
    file.write_text(f"# ours\n{LONG}\n\n  alice={OTHER}\n# end\nbase64-0123456789==\n")
    assert read_keys(file, {}).keys == [
        ApiKey.of(LONG),
        ApiKey.of(OTHER, "alice"),
        ApiKey.of("base64-0123456789=="),
    ]


def test_keys_of_the_environment_are_added(file: Path) -> None:
    file.write_text(LONG)
    assert read_keys(None, {}).keys == []
    assert read_keys(None, {"PDSERVE_API_KEYS": ""}).keys == []
    assert [key.name for key in read_keys(None, {"PDSERVE_API_KEYS": " a=x , b=y,"}).keys] == ["a", "b"]
    assert read_keys(None, {"PDSERVE_API_KEYS": f"@{file}"}).keys == [ApiKey.of(LONG)]
    both = read_keys(file, {"PDSERVE_API_KEYS": f"alice={OTHER}"})
    assert {key.name for key in both.keys} == {"alice", ApiKey.of(LONG).name}


def test_unreadable_keys_count_as_configured(file: Path) -> None:
    assert not requires_key(SecuritySection(), {"PDSERVE_API_KEYS": ""})
    assert requires_key(SecuritySection(), {"PDSERVE_API_KEYS": ","})
    assert requires_key(SecuritySection(api_keys=file), {})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# only a comment\n", ": the file has no API key"),
        ("alice:\n", ":1: alice must be a mapping"),
        ("alice: {}\n", ":1: alice needs either key or key-sha256"),
        (f"alice: {{key: {LONG}, key-sha256: {HASH}}}", ":1: alice needs either key or key-sha256"),
        ("alice:\n  key: 1234567812345678", ":2: alice.key must be a text"),
        (f"alice: {{key-sha256: {LONG}}}", ":1: alice.key-sha256 must be 64 hex digits"),
        (f"alice:\n  key: {LONG}\n  request-per-minute: 3", ":3: alice.request-per-minute is not a field"),
        (f"alice:\n  key: {LONG}\n  admin: root", ":3: alice.admin must be true or false"),
        (f"alice:\n  key: {LONG}\n  tokens-per-minute: 0", ":3: alice.tokens-per-minute must be a whole"),
        (f"alice:\n  key: {LONG}\n  tokens-per-minute: 1{'0' * 400}", ":3: alice.tokens-per-minute must"),
        (f'alice: {{key: "\\ud800{LONG}"}}', ":1: alice.key must be a text of ASCII characters"),
        (f"alice: {{key: {LONG}\xfc}}", ":1: alice.key must be a text of ASCII characters"),
        (f"{LONG}\xfc", ":1: the key must be of ASCII characters"),
        (f"alice: {{key: !!timestamp {LONG}}}", ":1: alice.key has no valid value"),
        ("alice: " + "[" * 1000, " is nested too deeply"),
        (f"al ice: {{key: {LONG}}}", ":1: al ice is no name for an API key"),
        (f"alice: {{key: {LONG}}}\nalice: {{key: {OTHER}}}", ":2: alice was already set in line 1"),
        (f"alice: {{key: {LONG}}}\nbob: {{key: {LONG}}}", "the API keys alice and bob are the same key"),
        (f"alice={LONG}\nalice={OTHER}", "there are two API keys of the name alice"),
        (f"al/ice={LONG}", ":1: the text before the = is no name"),
        (f"- {LONG}", ":1: the file is not a mapping"),
        (f"alice: {{key: *{LONG}}}", ":1: this is not YAML"),
        (f"alice:\n  key: !{LONG} x", ":2: alice.key has no valid value"),
    ],
)
def test_problems_of_a_file_are_reported_and_show_no_key(file: Path, text: str, problem: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_keys(file, {})
    assert str(error.value).removeprefix(str(file)).startswith(problem)
    assert LONG not in str(error.value)
    assert OTHER not in str(error.value)


@pytest.mark.parametrize("value", [",", " ", " , ,", "\t", "@/nowhere/keys", "alice=\udcff0123456789abcdef"])
def test_a_variable_without_usable_keys_is_refused(file: Path, value: str) -> None:
    file.write_text(LONG)
    for keys in (None, file):
        with pytest.raises(ConfigError, match="PDSERVE_API_KEYS"):
            read_keys(keys, {"PDSERVE_API_KEYS": value})


def test_short_keys_and_readable_files_are_warned_of(file: Path) -> None:
    file.write_text("alice:\n  key: short\n")
    file.chmod(0o644)
    short, readable = read_keys(file, {}).notes
    assert short.startswith(f"{file}:2: alice.key has fewer than 16 characters")
    assert f"chmod 600 {file}" in readable
    file.write_text(f"alice: {{key-sha256: {HASH}}}")
    assert read_keys(file, {}).notes == []
