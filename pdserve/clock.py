"""The time of day: the only place in the package that reads it.

Clocks of different hosts differ, and any of them may be set at any moment. So the time of day is for people (logs,
`created` of a model); whatever waits, expires or is compared uses `time.monotonic`
inside a host, and messages between hosts carry durations and ages.

Tests and chaos faults make the clock of a process wrong: `PDSERVE_CLOCK_OFFSET` are the seconds that it is ahead
(negative: behind), `PDSERVE_CLOCK_OFFSET_PREFILL`, `_DECODE` and `_FRONTEND` the same for all processes of one role,
also under `pdserve serve`.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

VARIABLE = "PDSERVE_CLOCK_OFFSET"

_offset: ContextVar[float | None] = ContextVar("pdserve_clock_offset", default=None)


def unix() -> float:
    """Unix seconds by this process's clock."""
    here = _offset.get()
    return time.time() + (float(os.environ.get(VARIABLE) or 0.0) if here is None else here)


@contextmanager
def skewed(seconds: float) -> Iterator[None]:
    """For tests: the clock is ahead by so many seconds inside, and in the tasks that are created inside."""
    token = _offset.set(seconds)
    try:
        yield
    finally:
        _offset.reset(token)


def skew_role(role: str) -> None:
    """Apply the offset of this process's role to this process and to those that it starts."""
    if given := os.environ.get(f"{VARIABLE}_{role.upper()}"):
        os.environ[VARIABLE] = given
