"""Reload the frontend's TLS certificate when its files change."""

import asyncio
import logging
from pathlib import Path

from pdserve.observe.metrics import CERTIFICATE_END
from pdserve.security.certificate import ServerCertificate
from pdserve.util.errors import ConfigError

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 10.0
"""Seconds between two checks of the files."""


def stamp(file: Path) -> tuple[int, ...]:
    """Return a value that changes when the file may have changed."""
    try:
        stat = file.stat()
    except OSError as error:
        return (error.errno or 0,)
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


class RenewedCertificate:
    """A TLS certificate that `watch` reloads. An unusable one raises ConfigError at the start; later it is logged, and
    the previous one stays in use."""

    def __init__(self, files: ServerCertificate, every: float = CHECK_INTERVAL) -> None:
        self._files = files
        self._every = every
        self._loaded = self._seen = self._stamps()
        self._error = ""
        """The last logged error, so that it is not repeated."""
        self.context = files.context()
        """TLS context of new connections."""
        CERTIFICATE_END.labels("api").set(files.valid_until().timestamp())
        logger.info("TLS with %s, valid until %s", files.chain, files.valid_until().date())

    async def watch(self) -> None:
        """Check the files until cancelled. Load changed files only when the next check finds no further change,
        because chain and key are written one after the other."""
        while True:
            await asyncio.sleep(self._every)
            stamps = self._stamps()
            if stamps == self._seen != self._loaded:
                self._load(stamps)
            self._seen = stamps

    def _load(self, stamps: list[tuple[int, ...]]) -> None:
        try:
            self.context = self._files.context()
            CERTIFICATE_END.labels("api").set(self._files.valid_until().timestamp())
            logger.info("loaded the new certificate, valid until %s", self._files.valid_until().date())
            self._loaded, self._error = stamps, ""
        except ConfigError as error:
            if str(error) != self._error:
                logger.error("cannot load the new certificate; keeping the previous one: %s", error)
            self._error = str(error)

    def _stamps(self) -> list[tuple[int, ...]]:
        return [stamp(file) for file in (self._files.chain, self._files.key)]
