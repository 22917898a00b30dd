"""When Python's garbage collector looks through all objects of a frontend: where no request waits for it.

A full collection holds the process, for 20-45 ms beside small requests and for 0.9 s beside an answer with 300,000
logprobs, and Python starts one whenever the objects have grown by a quarter. Here only the young objects are collected
while requests run. What else is garbage then is little: some 60 objects in 10,000 requests.
"""

import asyncio
import gc
import time
from collections.abc import Callable

YOUNG = 20_000
"""new objects, more than some requests in flight hold, after which the collector looks through the youngest: Python's
700 cost an eighth of a request's CPU"""
EVERY = 5.0
"""seconds between checks for a moment without requests"""
LATEST = 600.0
"""seconds without such a moment after which a full collection runs beside requests"""
_NEVER = 1 << 30


def freeze() -> None:
    """Take all objects of now out of later collections, and let full collections run only where they are asked for."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, _NEVER)


async def collect_when_idle(requests: Callable[[], int]) -> None:
    """Run full collections for ever: where there is something to collect and no request runs, or `LATEST` passed."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(EVERY)
        grown = gc.get_count()[2] > 0
        if (grown and not requests()) or time.monotonic() - last > LATEST:
            gc.collect()
            last = time.monotonic()
