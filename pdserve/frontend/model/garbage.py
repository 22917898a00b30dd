"""Garbage collection of a frontend: full collections wait for a moment without requests, at most `MAX_DELAY`.

A full collection stops the process for 20-45 ms, and beside a large response for 0.9 s. Python starts one whenever the
number of objects has grown by a quarter. While requests run, only young objects are collected, which leaves little
garbage.
"""

import asyncio
import gc
import time
from collections.abc import Callable

YOUNG = 20_000
"""New objects between two collections of the youngest generation: more than all requests in flight hold. Python's
default of 700 costs an eighth of a request's CPU."""
IDLE_CHECK_INTERVAL = 5.0
"""Seconds between two checks whether any request runs."""
MAX_DELAY = 600.0
"""Seconds without an idle moment after which a full collection runs beside requests."""
_NEVER = 1 << 30


def freeze() -> None:
    """Exclude all present objects from later collections, and stop automatic full collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, _NEVER)


async def collect_when_idle(requests: Callable[[], int]) -> None:
    """Run a full collection when no request runs and objects were added, or else after `MAX_DELAY`."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(IDLE_CHECK_INTERVAL)
        grown = gc.get_count()[2] > 0
        if (grown and not requests()) or time.monotonic() - last > MAX_DELAY:
            gc.collect()
            last = time.monotonic()
