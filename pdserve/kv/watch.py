"""Watches of KV reads: how long they take, which are overdue, and which were under way while this process hung; and the
clock by which their leases end."""

import math
import time
from collections.abc import Iterable, Mapping, Set
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


class HangWatch:
    """Assume that this process hung between two updates that are more than `longest` seconds apart."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._updated = 0.0
        self._unwatched: set[str] = set()

    def update(self, reads: Iterable[str], now: float) -> set[str]:
        """Take the reads that are under way, or have ended since the last update. Return those that were under way
        during a hang."""
        reads = set(reads)
        self._unwatched &= reads
        if now > self._updated + self._longest:
            self._unwatched |= reads
        self._updated = now
        return set(self._unwatched)


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


class RemoteClock:
    """The monotonic clock of the process that sends messages to this process. On another host it has another offset,
    which is learned from the quickest message so far: late messages do not change it."""

    def __init__(self) -> None:
        self._ahead = math.inf

    def message(self, sent: float, now: float) -> None:
        """A message came at `now` that was sent when the other clock showed `sent`."""
        self._ahead = min(self._ahead, now - sent)

    def to_local(self, there: float) -> float:
        """This host's time when the other clock shows `there`; before any message: minus infinity."""
        return -math.inf if math.isinf(self._ahead) else there + self._ahead
