"""Keeps live settings and LoRA adapters, which have no lease, in `settings.json` of the state directory. The embedded
etcd starts empty each time, and gets these keys before it counts as ready
(docs/decisions/0099-servers-start-empty.md)."""

import logging
from contextlib import suppress

import msgspec

from pdserve.config.schema import Config
from pdserve.registry import connect, keys
from pdserve.registry.base import Registry, apply_changes
from pdserve.security.credentials import Credentials
from pdserve.supervisor.state import StateFolder
from pdserve.util.errors import ConfigError, RegistryUnavailable

logger = logging.getLogger(__name__)

_NAME = "settings.json"


class KeptKeys:
    def __init__(self, folder: StateFolder, config: Config, credentials: Credentials | None) -> None:
        self._folder, self._namespace, self._credentials = folder, config.namespace, credentials
        self._file = str(config.path.resolve())
        self._kept: dict[str, str] | None = None
        """Value by key; None before the file is read."""

    async def fill(self, etcd: str) -> None:
        """Write the keys into an empty etcd, `keys.FILE` last. Raises ConfigError if etcd is not available."""
        if self._kept is None:
            self._kept = self._read()
        try:
            async with connect(etcd, self._namespace, self._credentials) as registry:
                for key, value in (*self._kept.items(), (keys.FILE, self._file)):
                    await registry.put(key, value.encode(), leased=False)
        except RegistryUnavailable as error:
            raise ConfigError([f"cannot write the kept settings into etcd: {error}"]) from error

    async def follow(self, registry: Registry) -> None:
        """Save each change; never returns. While `keys.FILE` is missing, etcd is not filled yet."""
        found: dict[str, bytes] = {}
        async for changes in registry.watch(keys.SETTINGS, keys.ADAPTERS, keys.FILE):
            apply_changes(changes, found)
            if keys.FILE in found:
                kept = {key: value.decode(errors="replace") for key, value in sorted(found.items())}
                self._folder.keep(_NAME, msgspec.json.format(msgspec.json.encode(kept)))
                del kept[keys.FILE]
                self._kept = kept

    def _read(self) -> dict[str, str]:
        """Read `settings.json` without live settings that were set for another graph file. Rename it if unreadable."""
        path, kept = self._folder.path / _NAME, dict[str, str]()
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            aside = path.with_name(f"{_NAME}.damaged")
            logger.error(
                "cannot read %s (%s): starting without live settings and adapters; keeping it as %s",
                path,
                error,
                aside,
            )
            with suppress(OSError):
                path.replace(aside)
        previous = kept.pop(keys.FILE, "another file")
        for key in [key for key in kept if key.startswith(keys.SETTINGS) and previous != self._file]:
            setting = f"{key.removeprefix(keys.SETTINGS)}={kept.pop(key)}"
            logger.warning("dropped live setting %s: it was set for %s", setting, previous)
        return kept
