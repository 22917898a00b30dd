"""Reads API keys with their names and limits.

Keys come from the file `Security.api-keys` and from PDSERVE_API_KEYS (keys separated by commas, or `@FILE`); the keys
of both sources are accepted. A file has a key, or name=key, on each line, or it is YAML:

    alice:
      key: sk-...              # or key-sha256: 64 hex digits; then the file holds no secret
      requests-per-minute: 60
      admin: true              # sees the receipts of all keys

No error or note shows a key.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pdserve.config.files.yaml_tree import Entry, Findings, did_you_mean, parse_tree
from pdserve.config.schema import SecuritySection
from pdserve.util.errors import ConfigError

KEYS_VARIABLE = "PDSERVE_API_KEYS"
MAX_LIMIT = 10**12
MIN_LENGTH = 16
"""Characters of a key. A shorter key can be guessed."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NAME_RULE = "use letters, digits and . _ @ -, at most 64"
_KEY = re.compile(r"[!-~]+")
_KEY_RULE = "of ASCII characters without spaces, since clients cannot send others"
_LIMITS = ("requests-per-minute", "tokens-per-minute", "concurrent-requests")
_LIMIT_RULE = f"a whole number from 1 to {MAX_LIMIT}; leave it out for no limit"
_FIELDS: dict[str, tuple[Callable[[Any], object], str]] = {
    "key": (
        lambda value: isinstance(value, str) and _KEY.fullmatch(value),
        f"a text {_KEY_RULE}; put quotes round it",
    ),
    "key-sha256": (
        lambda value: isinstance(value, str) and re.fullmatch(r"[0-9A-Fa-f]{64}", value),
        "64 hex digits, the SHA-256 of the key, in quotes",
    ),
    "admin": (lambda value: isinstance(value, bool), "true or false"),
    **dict.fromkeys(_LIMITS, (lambda value: type(value) is int and 0 < value <= MAX_LIMIT, _LIMIT_RULE)),
}
"""Fields of an API key -> a check of the value, and what it must be."""


@dataclass(frozen=True)
class KeyLimits:
    """Limits of a key over all frontends together; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


@dataclass(frozen=True)
class ApiKey:
    name: str
    """in logs and metrics"""
    digest: bytes
    """SHA-256 of the key"""
    limits: KeyLimits = KeyLimits()
    admin: bool = False
    """whether it sees the requests of all keys"""

    @classmethod
    def of(cls, key: str, name: str = "", limits: KeyLimits = KeyLimits(), admin: bool = False) -> Self:
        """Make an `ApiKey` of its secret text. The default name comes from the digest."""
        digest = digest_of(key)
        return cls(name or f"key-{digest.hex()[:12]}", digest, limits, admin)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


@dataclass
class FoundKeys:
    keys: list[ApiKey] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """warnings, full sentences"""


def requires_key(security: SecuritySection, env: Mapping[str, str]) -> bool:
    return security.api_keys is not None or bool(env.get(KEYS_VARIABLE))


def read_keys(file: Path | None, env: Mapping[str, str]) -> FoundKeys:
    """Return the keys of the file and of the environment. Raises ConfigError also for a file or a variable without a
    key: a mistake must not open the API to everyone."""
    read, value = FoundKeys(), env.get(KEYS_VARIABLE, "")
    if value.startswith("@"):
        _read_file(Path(value[1:]), read)
    elif value:
        _read_lines([(KEYS_VARIABLE, text) for text in value.split(",")], read)
        if not read.keys:
            raise ConfigError(
                [f"{KEYS_VARIABLE} is set and holds no key: set KEY1,KEY2 or @FILE, or unset it."]
            )
    if file is not None:
        _read_file(file, read)
    _check_unique(read.keys)
    return read


def _read_file(path: Path, into: FoundKeys) -> None:
    into.files.append(path)
    try:
        text, mode = path.read_text("utf-8-sig"), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        advice = f"correct Security.api-keys or {KEYS_VARIABLE}"
        raise ConfigError([f"{path}: the API keys cannot be read ({reason}): {advice}."]) from None
    lines = [
        (f"{path}:{number}", line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    before, secret = len(into.keys), True
    if all(len(line.split()) == 1 and not line.rstrip().endswith(":") for _, line in lines):
        _read_lines(lines, into)
    else:
        secret = _read_yaml(path, text, into)
    if len(into.keys) == before:
        raise ConfigError([f"{path}: the file has no API key: add one."])
    if secret and mode & 0o004:
        advice = f"chmod 600 {path}, or set key-sha256 instead of key"
        into.notes.append(f"{path} holds API keys, and every user of this machine can read it: {advice}.")


def _read_lines(lines: Iterable[tuple[str, str]], into: FoundKeys) -> None:
    """Read lines of `key` or `name=key`. A key may itself end in `=`."""
    for place, line in lines:
        if not (text := line.strip()):
            continue
        name, _, key = text.partition("=")
        if not key.strip("="):
            name, key = "", text
        elif not _NAME.fullmatch(name):
            raise ConfigError([f"{place}: the text before the = is no name for an API key: {_NAME_RULE}."])
        if not _KEY.fullmatch(key):
            raise ConfigError([f"{place}: the key must be {_KEY_RULE}."])
        _note_short(f"{place}: the key{name and f' {name}'}", key, into)
        into.keys.append(ApiKey.of(key, name))


def _read_yaml(path: Path, text: str, into: FoundKeys) -> bool:
    """Read a YAML file; return whether it has a secret key, not only digests."""
    findings, secret = Findings(path), False
    try:
        tree = parse_tree(text, findings, "name each key, as in docs/frontend.md")
        findings.raise_if_any()
    except ConfigError as error:  # YAML's own messages quote the file
        raise ConfigError([re.sub(r"'[^']*'", "...", problem) for problem in error.problems]) from None
    for entry in tree.values():
        if not _NAME.fullmatch(entry.path):
            findings.problem(entry, f"is no name for an API key: {_NAME_RULE}.")
        elif not isinstance(entry.value, dict):
            findings.problem(entry, "must be a mapping: indent `key: ...` under it.")
        else:
            values = _values(entry, findings)
            if key := values.get("key"):
                _note_short(f"{path}:{entry.children['key'].line}: {entry.path}.key", key, into)
            digest = digest_of(key) if key else bytes.fromhex(values.get("key-sha256", ""))
            limits = KeyLimits(*map(values.get, _LIMITS))
            into.keys.append(ApiKey(entry.path, digest, limits, values.get("admin", False)))
            secret = secret or key is not None
    findings.raise_if_any()
    return secret


def _values(entry: Entry, findings: Findings) -> dict[str, Any]:
    """Return the valid values of an API key's fields. No problem text shows a value."""
    values = {}
    for name, field_ in entry.children.items():
        valid, rule = _FIELDS.get(name, (None, ""))
        if valid is None:
            hint = did_you_mean(name, _FIELDS, f"remove it, or use one of: {', '.join(_FIELDS)}.")
            findings.problem(field_, f"is not a field of an API key: {hint}")
        elif valid(field_.value):
            values[name] = field_.value
        else:
            findings.problem(field_, f"must be {rule}.")
    if ("key" in entry.children) == ("key-sha256" in entry.children):
        findings.problem(entry, "needs either key or key-sha256.")
    return values


def _note_short(what: str, key: str, into: FoundKeys) -> None:
    if len(key) < MIN_LENGTH:
        into.notes.append(
            f"{what} has fewer than {MIN_LENGTH} characters and can be guessed: use a longer one."
        )


def _check_unique(keys: Iterable[ApiKey]) -> None:
    names: dict[str, ApiKey] = {}
    digests: dict[bytes, ApiKey] = {}
    for key in keys:
        if other := digests.get(key.digest):
            raise ConfigError([f"the API keys {other.name} and {key.name} are the same key: change one."])
        if key.name in names:
            raise ConfigError([f"there are two API keys of the name {key.name}: rename one of them."])
        digests[key.digest] = names[key.name] = key
