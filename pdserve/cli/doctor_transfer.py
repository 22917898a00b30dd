"""The two processes with which `pdserve doctor` measures KV transfer: one reads the other's memory over UCX, in blocks
as engines do. `python -m pdserve.cli.doctor_transfer lend` prints, as one line of JSON, what another process needs
to read its memory, and lends it until stdin ends; `... borrow` takes that line on stdin and prints the result."""

import json
import sys
import time

import msgspec
import numpy as np

from pdserve.kv.pool import KvPool, PoolOffer, PoolShape

SHAPE = PoolShape(layers=32, blocks=32, block_bytes=64 << 10)
"""64 MiB: the KV of 512 tokens of an 8B model (Llama 3's), 16 to a block"""
SECONDS = 1.0


def lend() -> None:
    pool = KvPool("doctor-lender", SHAPE)
    pool.memory[:] = 7
    print(msgspec.json.encode(pool.offer()).decode(), flush=True)
    sys.stdin.read()


def borrow() -> None:
    offer = msgspec.json.decode(sys.stdin.readline(), type=PoolOffer)
    pool = KvPool("doctor-borrower", SHAPE)
    remote = pool.connect(offer)
    here = np.arange(SHAPE.blocks, dtype=np.int32)
    there = here[::-1]  # no two neighbours stay neighbours, as in a cache that was used for a while
    first = remote.read(here, there)  # it connects
    backend = first.backend
    first.wait()
    count, started = 0, time.monotonic()
    while time.monotonic() - started < SECONDS:
        remote.read(here, there).wait()
        count += 1
    speed = count * pool.memory.nbytes / (time.monotonic() - started) / 1e9
    if not (pool.memory == 7).all():
        raise RuntimeError("the bytes that arrived are not those that were sent")
    print(json.dumps({"gigabytes_per_second": speed, "backend": backend}), flush=True)


if __name__ == "__main__":
    {"lend": lend, "borrow": borrow}[sys.argv[1]]()
