"""Load the frontend's TLS certificate anew when its files change."""

import asyncio
import logging
from pathlib import Path

from pdserve.security.certificate import ServerCertificate
from pdserve.util.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK = 10.0
"""seconds between two looks at the files"""


def stamp(file: Path) -> tuple[int, ...]:
    """Return what changes whenever the file may have changed."""
    try:
        stat = file.stat()
    except OSError as error:
        return (error.errno or 0,)
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


class RenewedCertificate:
    """A certificate that cannot be used raises ConfigError at the start; later it is logged, and the one before stays.
    `watch` must run."""

    def __init__(self, files: ServerCertificate, every: float = LOOK) -> None:
        self._files = files
        self._every = every
        self._loaded = self._seen = self._stamps()
        self._error = ""
        """that was logged last"""
        self.context = files.context()
        """for new connections"""
        logger.info("TLS with %s, valid until %s", files.chain, files.valid_until().date())

    async def watch(self) -> None:
        """Look until cancelled. Load changed files when they are the same at two looks: they are written one after the
        other. Those that cannot be used are tried at each look: they may be valid, or readable, later."""
        while True:
            await asyncio.sleep(self._every)
            stamps = self._stamps()
            if stamps == self._seen != self._loaded:
                self._load(stamps)
            self._seen = stamps

    def _load(self, stamps: list[tuple[int, ...]]) -> None:
        try:
            self.context = self._files.context()
            logger.info("a new certificate, valid until %s", self._files.valid_until().date())
            self._loaded, self._error = stamps, ""
        except ConfigError as error:
            if str(error) != self._error:
                logger.error("the new certificate is not taken, the one before stays: %s", error)
            self._error = str(error)

    def _stamps(self) -> list[tuple[int, ...]]:
        return [stamp(file) for file in (self._files.chain, self._files.key)]
