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

VARIABLE = "PDSERVE_CLOCK_OFFSET"


def unix() -> float:
    """Unix seconds by this process's clock."""
    return time.time() + float(os.environ.get(VARIABLE) or 0.0)


def skew_role(role: str) -> None:
    """Apply the offset of this process's role to this process and to those that it starts."""
    if given := os.environ.get(f"{VARIABLE}_{role.upper()}"):
        os.environ[VARIABLE] = given
