"""Watches of KV reads: how long they take, and which are overdue."""

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass


@dataclass
class _Read:
    due: float
    reported: bool = False


class StallWatch:
    """A read is due `floor` seconds after it began, plus the time that all bytes under way at that moment take at
    `rate` bytes per second: concurrent reads share the line."""

    def __init__(self, floor: float, rate: float) -> None:
        self._floor = floor
        self._rate = rate
        self._reads: dict[str, _Read] = {}

    def update(self, sizes: Mapping[str, int], now: float) -> list[str]:
        """Take the bytes of the reads under way, by request. Return the reads that became overdue, each once."""
        for gone in self._reads.keys() - sizes.keys():
            del self._reads[gone]
        for request in sizes.keys() - self._reads.keys():
            self._reads[request] = _Read(now + self._floor + sum(sizes.values()) / self._rate)
        overdue = [name for name, read in self._reads.items() if now >= read.due and not read.reported]
        for request in overdue:
            self._reads[request].reported = True
        return overdue


class ReadTimes:
    """The duration and size of each read."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[str, float, int]] = {}

    def begin(self, request: str, source: str, size: int) -> None:
        """A read of `size` bytes from engine `source` begins."""
        self._begun[request] = source, time.monotonic(), size

    def end(self, ended: Set[str], failed: Set[str]) -> list[list[str | float]]:
        """What the connector reports of the ended reads (`READS`), without failed and empty reads."""
        done = {request: self._begun.pop(request) for request in ended & self._begun.keys()}
        return [
            [request, source, time.monotonic() - began, size]
            for request, (source, began, size) in done.items()
            if size and request not in failed
        ]
