"""Measures latency and bandwidth of KV reads from an engine: `python -m pdserve.kv.probe HOST:PORT [FOLDER]`. HOST:PORT
is the engine's side channel; FOLDER has the graph's credentials. Prints JSON, and drops the data that it reads.

It is a process of its own because calls into NIXL cannot be cancelled."""

import ctypes
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from pdserve.kv.nixl import provide_nixl
from pdserve.kv.side_channel import CurveKey, ask
from pdserve.security.credentials import Credentials

HANDSHAKE_TIMEOUT = 3.0
LARGE_READ = 64 << 20
"""Bytes of each read that measures the bandwidth."""
BANDWIDTH_SECONDS = 1.0
"""Seconds for which the large reads are repeated."""
SMALL_READ, SMALL_READS = 64, 11
"""Bytes of each read that measures the latency, and the number of such reads."""

Region = tuple[int, int, int]
"""Address, length and device of memory."""


def main() -> None:
    path, folder = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    try:
        key = CurveKey.of(Credentials.load(Path(folder)) if folder else None)
        handshake = msgspec.msgpack.decode(ask(f"tcp://{path}", HANDSHAKE_TIMEOUT, key))
        found: dict[str, object] = {**_measure(msgspec.msgpack.decode(handshake["agent_metadata_bytes"]))}
    except TimeoutError as error:
        found = {"error": f"{error}: it hangs, or its host has other credentials"}
    except Exception as error:
        found = {"error": str(error) or type(error).__name__}
    sys.stdout.write(json.dumps(found) + "\n")


def _blocks(meta: dict[str, Any]) -> Iterator[Region]:
    device, strides = meta["device_id"], meta.get("block_strides") or meta["block_lens"]
    for base, length, stride in zip(meta["kv_caches_base_addr"], meta["block_lens"], strides, strict=False):
        for number in range(meta["num_blocks"]):
            yield base + number * stride, length, device


def _measure(meta: dict[str, Any]) -> dict[str, float]:
    provide_nixl()
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(f"pdserve-probe-{time.monotonic_ns()}", nixl_agent_config(backends=["UCX"]))
    blocks = list(islice(_blocks(meta), max(1, LARGE_READ // max(meta["block_lens"]))))
    size = sum(length for _, length, _ in blocks)
    memory = ctypes.create_string_buffer(size)
    address = ctypes.addressof(memory)
    registered = agent.register_memory([(address, size, 0, "")], "DRAM")
    peer = agent.add_remote_agent(meta["agent_metadata"])
    peer = peer.decode() if isinstance(peer, bytes) else peer
    first, _, device = blocks[0]
    kind = next(
        kind
        for kind in ("VRAM", "DRAM")
        if agent.check_remote_metadata(peer, agent.get_xfer_descs([(first, SMALL_READ, device)], kind))
    )

    def read(regions: list[Region]) -> float:
        """Read remote memory; return the seconds."""
        local, target = [], address
        for _, length, _ in regions:
            local.append((target, length, 0))
            target += length
        started = time.perf_counter()
        handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(regions, kind), peer
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds = time.perf_counter() - started
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ConnectionError(f"the read ended with {state}")
        return seconds

    small = [(first, SMALL_READ, device)]
    connected = read(small)
    latency = median(read(small) for _ in range(SMALL_READS))
    ends, times = time.monotonic() + BANDWIDTH_SECONDS, [read(blocks)]
    while time.monotonic() < ends:
        times.append(read(blocks))
    with suppress(Exception):
        agent.remove_remote_agent(peer)
        agent.deregister_memory(registered)
    return {"connected": connected, "latency": latency, "bandwidth": size / min(times)}


if __name__ == "__main__":
    main()
