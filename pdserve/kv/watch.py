"""How long KV reads take, which take longer than they should, which were under way while this process hung, and until
when reads may begin."""

import math
import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass


@dataclass
class _Read:
    due: float
    reported: bool = False


class StallWatch:
    """A read is due `floor` seconds after it began, plus the time that all bytes then under way take at `rate` bytes
    per second: reads share the line, so that a read among many takes longer than a read alone."""

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


class HangWatch:
    """Between two updates that are more than `longest` seconds apart this process hung, for all it knows."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._updated = 0.0
        self._unwatched: set[str] = set()

    def update(self, reads: Iterable[str], now: float) -> set[str]:
        """Take the reads that are under way or ended since the last update. Return those of them that were under way
        during a hang."""
        reads = set(reads)
        self._unwatched &= reads
        if now > self._updated + self._longest:
            self._unwatched |= reads
        self._updated = now
        return set(self._unwatched)


class ReadTimes:
    """How long each read takes, and what it brings."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[str, float, int]] = {}

    def begin(self, request: str, source: str, size: int) -> None:
        """The request's KV, of so many bytes, is read from engine `source`."""
        self._begun[request] = source, time.monotonic(), size

    def end(self, ended: Set[str], failed: Set[str]) -> list[list[str | float]]:
        """As the connector reports them (`READS`): without those that failed, and those of nothing."""
        found = {request: self._begun.pop(request) for request in ended & self._begun.keys()}
        return [
            [request, source, time.monotonic() - began, size]
            for request, (source, began, size) in found.items()
            if size and request not in failed
        ]


class RemoteClock:
    """The monotonic clock of the process from which messages come. On another host it runs as quickly but shows another
    time: the quickest message so far tells by how much, and a message that was held back is known by it."""

    def __init__(self) -> None:
        self._ahead = math.inf

    def message(self, sent: float, now: float) -> None:
        """Take a message that came now and was sent when that clock showed `sent`."""
        self._ahead = min(self._ahead, now - sent)

    def to_local(self, there: float) -> float:
        """What this host's clock shows when that clock shows `there`; before any message: the endless past."""
        return -math.inf if math.isinf(self._ahead) else there + self._ahead
