"""API keys. None configured: everybody may."""

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

    def allow(self, path: str, authorization: str | None, x_api_key: str | None = None) -> bool:
        """`Authorization: Bearer KEY` as OpenAI's clients send it, or `x-api-key` as Anthropic's."""
        if not self._digests or path in OPEN_PATHS:
            return True
        given = _given(authorization, x_api_key)
        digest = _digest(given)
        # all of them, so that the time says nothing about which
        return bool(given) and sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

    def who(self, authorization: str | None, x_api_key: str | None, address: str) -> str:
        """To be fair between clients: an allowed one's key or, without keys, its address, since any token could
        be made up."""
        if not self._digests:
            return address
        return _digest(_given(authorization, x_api_key)).hex()


def load_keys(environment: Mapping[str, str] = os.environ) -> ApiKeys:
    """From PDSERVE_API_KEYS: keys with commas between, or `@FILE` with one key on each line; unset or empty means no
    keys. Raises ConfigError for a value without a key: a slip must not open the server to everybody."""
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


def _given(authorization: str | None, x_api_key: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else x_api_key or ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
