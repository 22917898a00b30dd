"""A model's archive, kept in NATS' object store for frontends on other hosts."""

import asyncio
import logging
from pathlib import Path

from pdserve.errors import QueueUnavailable
from pdserve.queue.archives import archive_name, pack_model
from pdserve.queue.base import BlobStore

log = logging.getLogger(__name__)

RETRY, CHECK = 5.0, 60.0
"""seconds until it is stored again, while NATS is away and while it is there"""


class Archive:
    """A model's archive in NATS' object store; without `blobs` there is none. The card may name it before it is
    there: frontends that need it try again."""

    def __init__(self, model: str, blobs: BlobStore | None) -> None:
        self.name = ""
        """empty also for a hub id, which every host can load by itself"""
        self._model = Path(model)
        self._blobs = blobs
        self._data = b""
        self._missing = False

    async def make(self) -> None:
        """Pack it, and store it where NATS is there."""
        if self._blobs is not None and await asyncio.to_thread(self._model.is_dir):
            self._data = await asyncio.to_thread(pack_model, self._model)
            self.name = archive_name(self._data)
            await self._store(self._blobs)

    async def keep_stored(self) -> None:
        """For ever: NATS may come late, or lose its data."""
        while True:
            await asyncio.sleep(RETRY if self._missing else CHECK)
            if self._blobs is not None and self.name:
                await self._store(self._blobs)

    async def _store(self, blobs: BlobStore) -> None:
        missed, self._missing = self._missing, False
        try:
            await blobs.put(self.name, self._data)
        except QueueUnavailable as error:
            self._missing = True
            if not missed:
                log.warning("frontends on other hosts will not find the tokenizer for now: %s", error)
            return
        if missed:
            log.info("frontends on other hosts will find the tokenizer: NATS is back")
