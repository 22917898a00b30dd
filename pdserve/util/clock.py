"""The time of day. No other module reads it.

Clocks of different hosts differ, and any of them may be set at any moment. So the time of day is only shown to people
(logs, `created` of a model), and compared with the dates of certificates. Other comparisons and timeouts use
`time.monotonic` inside a host, and messages between hosts carry durations and ages.

Tests and chaos set a process's clock wrong: `PDSERVE_CLOCK_OFFSET` holds the seconds by which it is ahead (negative:
behind); `PDSERVE_CLOCK_OFFSET_PREFILL` (or `_DECODE`, `_BOTH`, `_FRONTEND`) replaces it in processes of that role.
"""

import os
import time

VARIABLE = "PDSERVE_CLOCK_OFFSET"


def unix() -> float:
    """Return Unix seconds."""
    return time.time() + float(os.environ.get(VARIABLE) or 0.0)


def skew_role(role: str) -> None:
    """Apply the offset of a role to this process and its children."""
    if given := os.environ.get(f"{VARIABLE}_{role.upper()}"):
        os.environ[VARIABLE] = given
