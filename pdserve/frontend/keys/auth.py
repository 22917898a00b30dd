"""Authenticate HTTP requests by API key. Without configured keys, every request is allowed."""

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path

from msgspec import Struct
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from pdserve.config.api_keys import ApiKey, FoundKeys, digest_of, read_keys
from pdserve.frontend.edge.certificate_reload import stamp
from pdserve.frontend.edge.response import HttpError
from pdserve.frontend.keys.limits import KeyLedger
from pdserve.observe.metrics import KEY_REQUESTS, KEY_TOKENS
from pdserve.util.errors import ConfigError
from pdserve.util.net import is_local_host_header

logger = logging.getLogger(__name__)

CHECK = 2.0
"""Seconds between two checks of the files."""
OWNER = "pdserve.owner"
"""ASGI scope extension: name of the API key of a batch line, which is a request that this process makes itself."""


class Viewer(Struct, frozen=True):
    key: str = ""
    """Name of the viewer's API key."""
    everything: bool = True
    """Whether the viewer may see addresses and the receipts of all keys."""


class ApiKeys:
    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self.ledger = KeyLedger()
        self._keys: dict[bytes, ApiKey] = {}
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Use these keys from now on. Running requests of a removed key go on."""
        before, self._keys = self._keys, {key.digest: key for key in keys}
        names = {key.name for key in self._keys.values()}
        for removed in {key.name for key in before.values()} - names:
            for metric in (KEY_REQUESTS, KEY_TOKENS):
                metric.remove_by_labels({"key": removed})
        self.ledger.replace(self._keys.values(), time.monotonic())

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, headers: Mapping[str, str]) -> ApiKey | None:
        """Return the request's key, from `Authorization: Bearer KEY` (OpenAI) or `x-api-key` (Anthropic); None if no
        keys are configured. Raises HttpError for a missing or unknown key."""
        if not self._keys:
            return None
        # look up a hash, so that the time of the look-up reveals nothing about the keys
        key = self._keys.get(digest_of(_given(headers)))
        if key is None:
            raise HttpError(401, "a valid API key is needed: Authorization: Bearer KEY")
        return key

    def of(self, request: Request) -> ApiKey | None:
        """Like `find`; a request that this process makes itself has the key that `OWNER` names."""
        owner = request.scope.get("extensions", {}).get(OWNER)
        if owner is None or not self._keys:
            return self.find(request.headers)
        if key := next((key for key in self._keys.values() if key.name == owner), None):
            return key
        raise HttpError(401, "the API key of this batch was removed")

    def viewer(self, headers: Mapping[str, str]) -> Viewer:
        """Return what a request for the state of the graph may see. Raises HttpError."""
        key = self.find(headers)
        return Viewer(key.name, key.admin) if key else Viewer()

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request for a page that needs no key may see all of it."""
        return not self._keys or digest_of(_given(headers)) in self._keys


def is_local(scope: Scope) -> bool:
    """Return whether the client is on this machine and its Host header is an address or localhost: any other name may
    belong to a web page that sends its browser here (DNS rebinding)."""
    client, server = scope.get("client"), scope.get("server")
    if not client or not server or not is_local_host_header(Headers(scope=scope).get("host", "localhost")):
        return False
    return client[0] == server[0] or ip_address(client[0]).is_loopback


class KeySource:
    """The files and the environment variable that hold the keys. Mistakes at the start raise ConfigError; later ones
    are logged, and the previous keys stay."""

    def __init__(self, file: Path | None, env: Mapping[str, str] = os.environ) -> None:
        self._file = file
        self._env = env
        self._notes, self._error = list[str](), ""
        """notes and error that were logged"""
        loaded = read_keys(file, env)
        self._states = {path: stamp(path) for path in loaded.files}
        self.keys = ApiKeys()
        self._take(loaded)

    async def follow(self) -> None:
        """Read the files again when they have changed. Unusable files are read at each check. Never returns."""
        while True:
            await asyncio.sleep(CHECK)
            states = await asyncio.to_thread(lambda: {path: stamp(path) for path in self._states})
            if states == self._states:
                continue
            try:
                self._take(await asyncio.to_thread(read_keys, self._file, self._env))
                self._states, self._error = states, ""
            except ConfigError as error:
                if str(error) != self._error:
                    logger.error("cannot load the new API keys; keeping the previous ones: %s", error)
                self._error = str(error)

    def _take(self, loaded: FoundKeys) -> None:
        self.keys.replace(loaded.keys)
        if loaded.keys:
            logger.info("%d API keys", len(loaded.keys))
        for note in loaded.notes:
            if note not in self._notes:
                logger.warning("%s", note)
        self._notes = loaded.notes


def _given(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def client_of(request: Request, key: str) -> str:
    """Return the client's name in fair queues: its API key's name. Without configured keys, it is the address, because
    the client could make up any key."""
    return key or (request.client.host if request.client else "")
