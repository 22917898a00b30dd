"""Finds KV reads that are overdue, and measures how long reads take."""

import time
from collections.abc import Mapping, Set


class StallWatch:
    """Finds overdue reads. A read may take `floor` seconds plus the time of all bytes that are being read at its begin,
    at `rate` bytes per second, because concurrent reads share the link."""

    def __init__(self, floor: float, rate: float) -> None:
        self._floor = floor
        self._rate = rate
        self._due: dict[str, float] = {}
        """By request: when its read is overdue; infinite once `update` has returned it."""

    def update(self, sizes: Mapping[str, int], now: float) -> list[str]:
        """Pass the bytes of all running reads, by request. Return the reads that became overdue, each once."""
        due = now + self._floor + sum(sizes.values()) / self._rate
        self._due = {request: self._due.get(request, due) for request in sizes}
        overdue = [request for request, due in self._due.items() if now >= due]
        self._due |= dict.fromkeys(overdue, float("inf"))
        return overdue


class ReadTimes:
    """Measures the duration and size of each read."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[str, float, int]] = {}

    def begin(self, request: str, source: str, size: int) -> None:
        self._begun[request] = source, time.monotonic(), size

    def end(self, ended: Set[str], failed: Set[str]) -> list[list[str | float]]:
        """Return [request, source, seconds, bytes] of each read in `ended` that did not fail and was not empty."""
        done = {request: self._begun.pop(request) for request in ended & self._begun.keys()}
        return [
            [request, source, time.monotonic() - began, size]
            for request, (source, began, size) in done.items()
            if size and request not in failed
        ]
