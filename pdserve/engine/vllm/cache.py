"""A mirror of the engine's prefix cache, kept from its KV events, so that a hit is known without asking the
engine."""

import logging
from itertools import islice
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from pdserve.engine.vllm import api as api
from pdserve.tasks import Owner

log = logging.getLogger(__name__)

_decode = msgspec.msgpack.Decoder(api.KVEventBatch).decode


class CacheMirror:
    """Binds its socket on entering, which must happen before the engine starts: the engine connects to it.
    A lost event makes it wrong until the block is stored or removed again; so is it for the moment that an
    event takes."""

    def __init__(self) -> None:
        self._blocks: set[Any] = set()
        self._config: api.VllmConfig | None = None
        self.endpoint = ""
        self._tasks = Owner()

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._tasks.forever(self._read, "kv events")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.stop()
        self._context.destroy(linger=0)

    def follow(self, config: api.VllmConfig) -> None:
        """From here on `hit` answers: the engine runs, and its block size is settled."""
        if config.cache_config.enable_prefix_caching:
            api.seed_hashes(config)
            self._config = config

    def hit(self, request: api.EngineCoreRequest) -> int:
        """Leading tokens of the request's prompt that are cached; as in vLLM never all of them, because the
        last one has to be computed."""
        if self._config is None or not self._blocks:
            return 0
        size: int = self._config.cache_config.block_size
        hits = 0
        for block in islice(
            api.chain_hashes(self._config, request), (len(request.prompt_token_ids) - 1) // size
        ):
            if block not in self._blocks:
                break
            hits += 1
        return hits * size

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
