"""Measures the way to an engine's KV as a decode engine would read it: `python -m pdserve.kv.probe HOST:PORT [FOLDER]`,
the engine's side channel and the graph's credentials. Prints JSON. It only reads, and what it reads is not looked at.

A process of its own: calls into NIXL cannot be given up."""

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

ANSWER_WITHIN = 3.0
"""seconds"""
MOST = 64 << 20
"""bytes that are read for the bandwidth, at a time"""
FOR = 1.0
"""seconds in which that is read again and again"""
SMALL, TRIES = 64, 11
"""bytes that are read for the latency, and how often"""

Piece = tuple[int, int, int]
"""address, length and device of memory"""


def main() -> None:
    path, folder = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    try:
        key = CurveKey.of(Credentials.load(Path(folder)) if folder else None)
        handshake = msgspec.msgpack.decode(ask(f"tcp://{path}", ANSWER_WITHIN, key))
        found: dict[str, object] = {**_measure(msgspec.msgpack.decode(handshake["agent_metadata_bytes"]))}
    except TimeoutError as error:
        found = {"error": f"{error}: it hangs, or its host has other credentials"}
    except Exception as error:
        found = {"error": str(error) or type(error).__name__}
    sys.stdout.write(json.dumps(found) + "\n")


def _blocks(meta: dict[str, Any]) -> Iterator[Piece]:
    device, strides = meta["device_id"], meta.get("block_strides") or meta["block_lens"]
    for base, length, stride in zip(meta["kv_caches_base_addr"], meta["block_lens"], strides, strict=False):
        for number in range(meta["num_blocks"]):
            yield base + number * stride, length, device


def _measure(meta: dict[str, Any]) -> dict[str, float]:
    provide_nixl()
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(f"pdserve-probe-{time.monotonic_ns()}", nixl_agent_config(backends=["UCX"]))
    blocks = list(islice(_blocks(meta), max(1, MOST // max(meta["block_lens"]))))
    size = sum(length for _, length, _ in blocks)
    memory = ctypes.create_string_buffer(size)
    here = ctypes.addressof(memory)
    registered = agent.register_memory([(here, size, 0, "")], "DRAM")
    peer = agent.add_remote_agent(meta["agent_metadata"])
    peer = peer.decode() if isinstance(peer, bytes) else peer
    first, _, device = blocks[0]
    kind = next(
        kind
        for kind in ("VRAM", "DRAM")
        if agent.check_remote_metadata(peer, agent.get_xfer_descs([(first, SMALL, device)], kind))
    )

    def read(pieces: list[Piece]) -> float:
        local, at = [], here
        for _, length, _ in pieces:
            local.append((at, length, 0))
            at += length
        started = time.perf_counter()
        handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(pieces, kind), peer
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds = time.perf_counter() - started
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ConnectionError(f"the read ended with {state}")
        return seconds

    connected = read([(first, SMALL, device)])
    latency = median(read([(first, SMALL, device)]) for _ in range(TRIES))
    until, taken = time.monotonic() + FOR, [read(blocks)]
    while time.monotonic() < until:
        taken.append(read(blocks))
    with suppress(Exception):
        agent.remove_remote_agent(peer)
        agent.deregister_memory(registered)
    return {"connected": connected, "latency": latency, "bandwidth": size / min(taken)}


if __name__ == "__main__":
    main()
