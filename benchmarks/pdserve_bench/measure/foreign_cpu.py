"""The CPU that other programs take on this machine while something is measured: they make it slower, and unevenly."""

import time
from contextlib import suppress

import psutil

_IDLE = 0.05
"""of the machine: by so much the two clocks that are compared may differ"""


class ForeignLoad:
    """Measures from its making on."""

    def __init__(self) -> None:
        self._began, self._busy, self._ours = time.monotonic(), _busy(), _ours()

    def share(self) -> float | None:
        """The part of all cores' time since then that went to processes which this one did not start, directly or not.
        None where the machine does not tell: less than our own."""
        whole = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        foreign = (_busy() - self._busy) - (_ours() - self._ours)
        if whole <= 0 or foreign < -_IDLE * whole:
            return None
        return max(0.0, foreign / whole)


def _busy() -> float:
    """CPU seconds of all processes of the machine, and what a hypervisor gave to other machines."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "steal", 0.0))


def _ours() -> float:
    """CPU seconds of this process and all below it, with those of children that have ended."""
    this, seconds = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):
            seconds += sum(process.cpu_times()[:4])  # own, and of children that were waited for
    return seconds
