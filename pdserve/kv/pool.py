"""The two ends of a KV transfer without an engine, to measure with (`pdserve doctor`).

Each end is a process with a NIXL agent configured like an engine's, and a pool of host memory, laid out and registered
like vLLM's KV cache: a region for each layer, with its blocks. A read is like one of vLLM's connector: a descriptor for
each layer and block, out of lists that were prepared when the two ends connected, and a notification for the other
end."""

import importlib
import mmap
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdserve.kv.nixl import provide_nixl, quiet_agents

UCX_THREADS = 4
"""what vLLM's connector asks for by default (`num_threads`)"""
LOOK_EVERY = 0.0002
"""seconds between two looks at a read that is not done. An engine looks once between two steps. Looking without a pause
takes a lock from the threads that copy, and halves their speed."""


class PoolShape(msgspec.Struct, frozen=True):
    layers: int
    blocks: int
    block_bytes: int
    """bytes of a block in one layer"""

    @property
    def bytes_per_block(self) -> int:
        return self.layers * self.block_bytes


class PoolOffer(msgspec.Struct, frozen=True):
    """What another process needs to read a pool."""

    agent: bytes
    """NIXL's metadata of its agent"""
    addresses: list[int]
    """of each layer"""
    shape: PoolShape


class TransferFailed(Exception):
    """NIXL reports an error, or the read did not end in time."""


class KvPool:
    def __init__(self, name: str, shape: PoolShape) -> None:
        provide_nixl()
        api = importlib.import_module("nixl._api")
        config = api.nixl_agent_config(num_threads=UCX_THREADS, capture_telemetry=True)
        with quiet_agents():
            self.agent = api.nixl_agent(f"{name}-{os.getpid()}", config)
        self.shape = shape
        self.memory = host_memory(shape)
        self._addresses = [int(layer.ctypes.data) for layer in self.memory]
        regions = [(address, shape.blocks * shape.block_bytes, 0, "") for address in self._addresses]
        self.agent.register_memory(self.agent.get_reg_descs(regions, "DRAM"))
        self.prepared = self._prepare("NIXL_INIT_AGENT", self._addresses, shape)

    def offer(self) -> PoolOffer:
        return PoolOffer(self.agent.get_agent_metadata(), self._addresses, self.shape)

    def connect(self, offer: PoolOffer) -> "RemotePool":
        """To a pool with as many layers, and blocks of the same size. UCX itself connects with the first read."""
        peer = self.agent.add_remote_agent(offer.agent)
        return RemotePool(self, offer.shape, self._prepare(peer, offer.addresses, offer.shape))

    def _prepare(self, agent: str, addresses: Sequence[int], shape: PoolShape) -> Any:
        offsets = np.arange(shape.blocks, dtype=np.uint64) * np.uint64(shape.block_bytes)
        starts = (np.array(addresses, np.uint64)[:, None] + offsets).ravel()
        table = np.stack([starts, np.full_like(starts, shape.block_bytes), np.zeros_like(starts)], axis=1)
        return self.agent.prep_xfer_dlist(agent, self.agent.get_xfer_descs(table, "DRAM"))


class RemotePool:
    """Another process's pool, as it is read from this one."""

    def __init__(self, pool: KvPool, shape: PoolShape, prepared: Any) -> None:
        self._pool, self._shape, self._prepared = pool, shape, prepared

    def read(self, local: NDArray[np.int32], remote: NDArray[np.int32]) -> "KvRead":
        """Begin to copy the `remote` blocks, in all layers, into the `local` ones; this may copy all of it already."""
        here, there = descriptors(self._pool.shape, local), descriptors(self._shape, remote)
        agent, ours = self._pool.agent, self._pool.prepared
        handle = agent.make_prepped_xfer("READ", ours, here, self._prepared, there, notif_msg=b"read")
        return KvRead(agent, handle, agent.transfer(handle))


class KvRead:
    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent, self._handle, self._state = agent, handle, state

    @property
    def backend(self) -> str:
        """Name of NIXL's backend; only before `done` has returned true."""
        return str(self._agent.query_xfer_backend(self._handle))

    def done(self) -> bool:
        """Raises TransferFailed."""
        if self._state not in ("DONE", "ERR"):
            self._state = self._agent.check_xfer_state(self._handle)
        if self._state == "ERR":
            raise TransferFailed("NIXL reports an error")
        if self._state == "DONE" and self._handle is not None:
            self._agent.release_xfer_handle(self._handle)
            self._handle = None
        return self._state == "DONE"

    def wait(self, look_every: float = LOOK_EVERY, timeout: float = 60.0) -> None:
        """Block until the read is done; times in seconds. Raises TransferFailed."""
        deadline = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() > deadline:
                raise TransferFailed(f"not done after {timeout:g} s")
            if look_every:
                time.sleep(look_every)


def descriptors(shape: PoolShape, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
    """Descriptors of these blocks in all layers, layer by layer."""
    layers = np.arange(shape.layers, dtype=np.int32)[:, None] * np.int32(shape.blocks)
    return (layers + blocks.astype(np.int32)[None, :]).ravel()


def host_memory(shape: PoolShape) -> NDArray[np.uint8]:
    """Zeroed memory by layer, block and byte, in pages of PyTorch's size (NumPy would ask for huge pages)."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    area = mmap.mmap(-1, shape.bytes_per_block * shape.blocks, flags=private)
    memory = np.frombuffer(area, np.uint8).reshape(shape.layers, shape.blocks, shape.block_bytes)
    memory[:] = 0
    return memory
