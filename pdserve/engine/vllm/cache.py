"""Mirrors the engine's prefix cache from its KV events, so that a prefix hit is known without asking the engine."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import starmap
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pdserve.contract.prefixes import CachedPrefixes, block_names, image_key, root_name
from pdserve.engine.vllm import api
from pdserve.runtime.tasks import Lifetime, TaskOwner

logger = logging.getLogger(__name__)

_decode = msgspec.msgpack.Decoder(api.KVEventBatch).decode


class CacheMirror(Lifetime):
    """Enter it before the engine starts; call `follow` after the start, before the first request. The mirror may be
    wrong: it lags behind the engine, and events may get lost."""

    def __init__(self) -> None:
        self.prefixes = CachedPrefixes()
        self._blocks: dict[Any, tuple[bytes, int]] = {}
        """vLLM's hash of a block -> its name, and its position in the prompt from 1."""
        self.endpoint = api.get_open_zmq_ipc_path()
        """Where the engine publishes its events: a socket that only this user can reach."""

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        context = zmq.asyncio.Context()
        try:
            self._socket = context.socket(zmq.SUB)
            self._socket.subscribe(b"")
            async with TaskOwner() as tasks:
                tasks.forever(self._read, "kv events")
                yield
        finally:
            context.destroy(linger=0)

    def follow(self) -> None:
        self._socket.connect(self.endpoint)

    def clear(self) -> None:
        self.prefixes.clear()
        self._blocks.clear()

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                for event in _decode(frames[-1]).events:
                    self._apply(event)
            except (ValueError, TypeError, RecursionError) as error:
                logger.warning("skipped an unreadable KV event: %s", error)

    def _apply(self, event: object) -> None:
        match event:
            case api.BlockStored(medium=api.MEDIUM_CPU):
                self._store_in_host(event)
            case api.BlockStored():
                self._store(event)
            case api.BlockRemoved() if not event.group_idx:
                host = event.medium == api.MEDIUM_CPU
                for block in event.block_hashes:
                    if block in self._blocks and self.prefixes.remove(self._blocks[block][0], host=host):
                        del self._blocks[block]
            case api.AllBlocksCleared():
                self.clear()

    def _store_in_host(self, event: api.BlockStored) -> None:
        """Record blocks in host memory. The event has no tokens, but the blocks were in the cache before."""
        for block in event.block_hashes:
            if block in self._blocks:
                self.prefixes.add(*self._blocks[block], host=True)

    def _store(self, event: api.BlockStored) -> None:
        """Record full blocks that a prompt can hit, but no blocks of embeddings or of a second cache group. The extra
        keys of a block are the id of its LoRA adapter, the name and offset of each image in it and, in the first block,
        the salt."""
        size, before, depth = self.prefixes.block_size, event.parent_block_hash, 0
        adapter = int(event.lora_name, 16) if event.lora_name else 0
        extra = [list(keys or ())[bool(adapter) :] for keys in event.extra_keys or [None]]
        salt = extra[0].pop() if extra[0] and isinstance(extra[0][-1], str) else None
        if event.group_idx or len(event.token_ids) != size * len(event.block_hashes):
            return
        if any(isinstance(each, str) for keys in extra for each in keys):
            return
        shown = {number * size: b"".join(starmap(image_key, keys)) for number, keys in enumerate(extra)}
        if before is None:
            parent = root_name(salt, adapter)
        elif before in self._blocks and salt is None:
            parent, depth = self._blocks[before]
        else:
            return
        for block, name in zip(
            event.block_hashes, block_names(event.token_ids, size, parent, shown=shown), strict=True
        ):
            depth += 1
            self._blocks[block] = name, depth
            self.prefixes.add(name, depth)
