"""CPU seconds of a system's processes."""

import time
from collections.abc import Iterable
from contextlib import suppress


class CpuMeter:
    """Reads the CPU time of these processes together. What has ended since keeps the figure that was read last."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._last = dict.fromkeys(pids, 0.0)
        self.read()

    def read(self) -> float:
        for pid in self._last:
            with suppress(OSError):
                self._last[pid] = cpu_seconds(pid)
        return sum(self._last.values())


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, those that have ended included, to the nanosecond: what psutil reads from
    /proc is counted in hundredths. Raises OSError where it is gone."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3)
