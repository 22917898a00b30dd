"""API keys. Where none are configured, every request is allowed."""

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pdserve.errors import ConfigError
from pdserve.frontend.answer import HttpError

OPEN_PATHS = frozenset({"/health", "/ping", "/load", "/version", "/metrics"})
"""for probes and scrapers, which have no key"""


@dataclass(frozen=True)
class ApiKey:
    name: str
    """in logs and metrics; what the client stores is bound to it"""
    digest: bytes
    """SHA-256 of the key"""

    @classmethod
    def of(cls, key: str, name: str = "") -> Self:
        """One without a name is called by its digest, which stays the same wherever the key stands."""
        digest = _digest(key)
        return cls(name or f"key-{digest.hex()[:12]}", digest)


class ApiKeys:
    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = {key.digest: key for key in keys}

    def find(self, path: str, headers: Mapping[str, str]) -> ApiKey | None:
        """The key that a request came with: `Authorization: Bearer KEY` as OpenAI's clients send it, or `x-api-key` as
        Anthropic's. None where none is needed. Raises HttpError for a request that needs one and has none."""
        if not self._keys or path in OPEN_PATHS:
            return None
        digest = _digest(_given(headers))
        # looked up by a hash that no client can steer, so that the time tells nothing about the keys
        key = self._keys.get(digest)
        if key is None or not hmac.compare_digest(key.digest, digest):
            raise HttpError(401, "a valid API key is needed: Authorization: Bearer KEY")
        return key


def load_keys(environment: Mapping[str, str] = os.environ) -> ApiKeys:
    """From PDSERVE_API_KEYS: keys with commas between, or `@FILE` with one key on each line; unset or empty means no
    keys. Raises ConfigError for a value without a key: a slip must not open the server to all."""
    value = environment.get("PDSERVE_API_KEYS", "")
    if not value.startswith("@"):
        keys = [key.strip() for key in value.split(",") if key.strip()]
        if value and not keys:
            text = f"PDSERVE_API_KEYS is {value!r}, which holds no key: set KEY1,KEY2 or @FILE, or unset it."
            raise ConfigError([text])
        return ApiKeys(map(ApiKey.of, keys))
    try:
        lines = Path(value[1:]).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"PDSERVE_API_KEYS: {value[1:]} cannot be read: {error}."]) from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError([f"PDSERVE_API_KEYS: there is no key in {value[1:]}."])
    return ApiKeys(map(ApiKey.of, keys))


def _given(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
