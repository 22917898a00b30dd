"""Which KV reads take longer than they should, which were not watched, and until when they may begin. Pure: times come
from outside."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass
class _Read:
    due: float
    reported: bool = False


class StallWatch:
    """A read is due `floor` seconds after it began, plus the time that all bytes then on their way take at
    `rate` bytes per second: reads share the line, so that one of many takes longer than one alone."""

    def __init__(self, floor: float, rate: float) -> None:
        self._floor = floor
        self._rate = rate
        self._reads: dict[str, _Read] = {}

    def look(self, sizes: Mapping[str, int], now: float) -> list[str]:
        """`sizes` are the bytes of the reads under way, by request. Returns those newly overdue, each
        once."""
        for gone in self._reads.keys() - sizes.keys():
            del self._reads[gone]
        for request in sizes.keys() - self._reads.keys():
            self._reads[request] = _Read(now + self._floor + sum(sizes.values()) / self._rate)
        overdue = [name for name, read in self._reads.items() if now >= read.due and not read.reported]
        for request in overdue:
            self._reads[request].reported = True
        return overdue


class Naps:
    """A process that looks only now and then hung in between, for all it knows."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._looked = 0.0
        self._slept_through: set[str] = set()

    def look(self, reads: Iterable[str], now: float) -> set[str]:
        """`reads` are under way, or ended since the last look. Returns those of them that were under way during
        a gap of more than `longest` seconds between two looks."""
        reads = set(reads)
        self._slept_through &= reads
        if now > self._looked + self._longest:
            self._slept_through |= reads
        self._looked = now
        return set(self._slept_through)


class SenderClock:
    """The monotonic clock of the process from which messages come. Elsewhere than on this host it runs as quickly, but
    shows another time: the quickest message so far tells by how much, and one that was held back is known by it."""

    def __init__(self) -> None:
        self._ahead = math.inf

    def heard(self, sent: float, now: float) -> None:
        """A message came now that was sent when that clock showed `sent`."""
        self._ahead = min(self._ahead, now - sent)

    def here(self, there: float) -> float:
        """When this host's clock shows what that one shows at `there`; before any message: for ever ago."""
        return -math.inf if math.isinf(self._ahead) else there + self._ahead
