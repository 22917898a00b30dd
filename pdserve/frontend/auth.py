"""API keys. Where none are configured, every request is allowed."""

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from pdserve.errors import ConfigError

OPEN_PATHS = frozenset({"/health", "/ping", "/load", "/version", "/metrics"})
"""for probes and scrapers, which have no key"""


class ApiKeys:
    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    def allow(self, path: str, headers: Mapping[str, str]) -> bool:
        """`Authorization: Bearer KEY` as OpenAI's clients send it, or `x-api-key` as Anthropic's."""
        if not self._digests or path in OPEN_PATHS:
            return True
        given = _given(headers)
        digest = _digest(given)
        # compare with all of them, so that the time tells nothing about which one matches
        return bool(given) and sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

    def client(self, headers: Mapping[str, str], address: str) -> str:
        """The client that a request belongs to, to be fair between clients: an allowed request's key or, without keys,
        its address, since any key could be made up."""
        if not self._digests:
            return address
        return _digest(_given(headers)).hex()


def load_keys(environment: Mapping[str, str] = os.environ) -> ApiKeys:
    """From PDSERVE_API_KEYS: keys with commas between, or `@FILE` with one key on each line; unset or empty means no
    keys. Raises ConfigError for a value without a key: a slip must not open the server to all."""
    value = environment.get("PDSERVE_API_KEYS", "")
    if not value.startswith("@"):
        keys = [key.strip() for key in value.split(",") if key.strip()]
        if value and not keys:
            text = f"PDSERVE_API_KEYS is {value!r}, which holds no key: set KEY1,KEY2 or @FILE, or unset it."
            raise ConfigError([text])
        return ApiKeys(keys)
    try:
        lines = Path(value[1:]).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"PDSERVE_API_KEYS: {value[1:]} cannot be read: {error}."]) from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError([f"PDSERVE_API_KEYS: there is no key in {value[1:]}."])
    return ApiKeys(keys)


def _given(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
