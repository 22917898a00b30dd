"""Common wake-ups for the periodic work of a process, so that an idle process wakes once and not for each task."""

import asyncio
import random
import time

_PHASE = random.random()
"""Differs between processes, so that those of a host do not all wake at once."""


def until_tick(interval: float) -> float:
    """Return the seconds to the next tick. If an interval divides a longer one, their ticks coincide. A tick that is
    less than a tenth of the interval away is skipped, because timers may be early."""
    left = interval - (time.monotonic() - _PHASE) % interval
    return left if left > interval / 10 else left + interval


async def tick(interval: float) -> None:
    """Sleep until the next tick: about `interval` seconds in a loop, but mostly less the first time."""
    await asyncio.sleep(until_tick(interval))
