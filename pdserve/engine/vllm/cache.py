"""A mirror of the engine's prefix cache, kept up by its KV events, so that a prefix hit is known without a question to
the engine."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice, takewhile
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pdserve.engine.vllm import api
from pdserve.tasks import Lifetime, Owner

log = logging.getLogger(__name__)

_decode = msgspec.msgpack.Decoder(api.KVEventBatch).decode


class CacheMirror(Lifetime):
    """Enter it before the engine starts: it binds the socket to which the engine connects. It is wrong for the moment
    that an event takes; a lost event makes it wrong until the block is stored or removed again."""

    def __init__(self) -> None:
        self._blocks: set[Any] = set()
        self._config: api.VllmConfig | None = None
        self.endpoint = ""

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        context = zmq.asyncio.Context()
        try:
            self._socket = context.socket(zmq.SUB)
            self._socket.subscribe(b"")
            port = self._socket.bind_to_random_port("tcp://127.0.0.1")
            self.endpoint = f"tcp://127.0.0.1:{port}"
            async with Owner() as tasks:
                tasks.forever(self._read, "kv events")
                yield
        finally:
            context.destroy(linger=0)

    def follow(self, config: api.VllmConfig) -> None:
        """Answer `hit` from now on: the engine runs, and its block size is settled."""
        if config.cache_config.enable_prefix_caching:
            api.seed_hashes(config)
            self._config = config

    def hit(self, request: api.EngineCoreRequest) -> int:
        """Leading tokens of the request's prompt that are cached; as in vLLM never all of them, because the last token
        has to be computed."""
        if self._config is None or not self._blocks:
            return 0
        size: int = self._config.cache_config.block_size
        whole = islice(api.chain_hashes(self._config, request), (len(request.prompt_token_ids) - 1) // size)
        return size * sum(1 for _ in takewhile(self._blocks.__contains__, whole))

    def clear(self) -> None:
        self._blocks.clear()

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                for event in _decode(frames[-1]).events:
                    self._apply(event)
            except (ValueError, TypeError, RecursionError) as error:
                log.warning("a KV event is skipped, it cannot be read: %s", error)

    def _apply(self, event: object) -> None:
        match event:
            case api.BlockStored():
                self._blocks.update(event.block_hashes)
            case api.BlockRemoved():
                self._blocks.difference_update(event.block_hashes)
            case api.AllBlocksCleared():
                self.clear()
