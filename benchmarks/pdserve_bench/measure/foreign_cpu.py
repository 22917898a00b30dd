"""The CPU share that other programs take during a measurement."""

import time
from contextlib import suppress

import psutil

_TOLERANCE = 0.05
"""Tolerated excess of our processes' CPU time over the machine's, as a share of all cores."""


class ForeignLoad:
    """Measures from its construction on."""

    def __init__(self) -> None:
        self._began, self._busy, self._ours = time.monotonic(), _busy(), _ours()

    def share(self) -> float | None:
        """Share of all cores used by other programs. None if the machine reports less than our own use."""
        whole = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        foreign = (_busy() - self._busy) - (_ours() - self._ours)
        if whole <= 0 or foreign < -_TOLERANCE * whole:
            return None
        return max(0.0, foreign / whole)


def _busy() -> float:
    """Return the CPU seconds of all processes, with time stolen by a hypervisor."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "steal", 0.0))


def _ours() -> float:
    """Return the CPU seconds of this process and its descendants, with children that have ended."""
    this, seconds = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):
            seconds += sum(process.cpu_times()[:4])  # its own, and those of reaped children
    return seconds
