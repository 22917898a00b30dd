"""The time of day: the only place in the package that reads it.

Clocks of different hosts differ, and any of them may be set at any moment. So the time of day is for people (logs,
`created` of a model) and for measuring how wrong it is; whatever waits, expires or is compared uses `time.monotonic`
inside a host, and messages between hosts carry durations and ages.

For tests, and for the chaos faults, a process's clock can be made wrong: `PDSERVE_CLOCK_OFFSET` is a number of seconds
that its clock is ahead (or behind, below 0), and `PDSERVE_CLOCK_OFFSET_PREFILL`, `_DECODE`, `_FRONTEND` are the same
for the processes of one role, also under `pdserve serve`. Inside one process, `skewed` does so for the tasks that are
started in it.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

VARIABLE = "PDSERVE_CLOCK_OFFSET"
LARGE_SKEW = 1.0
"""seconds that a host's clock may differ from the NATS server's without a word"""

_offset: ContextVar[float | None] = ContextVar("pdserve_clock_offset", default=None)


def unix() -> float:
    """Unix seconds, as this process sees them."""
    here = _offset.get()
    return time.time() + (float(os.environ.get(VARIABLE) or 0.0) if here is None else here)


@contextmanager
def skewed(seconds: float) -> Iterator[None]:
    """For tests: inside, and in the tasks that are created inside, the clock is ahead by so much."""
    token = _offset.set(seconds)
    try:
        yield
    finally:
        _offset.reset(token)


def skew_role(role: str) -> None:
    """The offset of this process's role becomes that of the process and of the processes that it starts."""
    if given := os.environ.get(f"{VARIABLE}_{role.upper()}"):
        os.environ[VARIABLE] = given
