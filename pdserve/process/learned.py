"""How long prefills take, learned from those that a worker sees. Pure: times come from outside.

Some measurements are bad: a read that stalled, a machine busy with other things. Speeds also change: a worker gets
slow, or its machine gets free. So a value far above the mean only counts when the next one confirms it, and a bad
value fades with time, so that the path is tried again.
"""

from dataclasses import dataclass

WEIGHT = 0.2
"""of the newest measurement in the mean"""
FAR_OFF = 3.0
"""factor to the mean beyond which a measurement is no noise, but a change or an accident"""
LONGEST_ROW = 8
"""most prompts that are measured together"""
SHORTEST = 256
"""tokens; with fewer, the fixed cost of a step is measured"""
HALF_LIFE = 10.0
"""seconds in which a bad value moves halfway to the better alternative"""


@dataclass
class LearnedMean:
    """A running mean of seconds."""

    value: float | None = None
    """None before the first measurement"""
    at: float = 0.0
    """monotonic seconds of the last measurement"""
    _doubted: bool = False
    """the last measurement was far above the mean and did not count"""

    def learn(self, measured: float, now: float) -> None:
        self.at, far_off = now, self.value is not None and measured > FAR_OFF * self.value
        if far_off and not self._doubted:
            self._doubted = True
            return
        if self.value is None or far_off or measured * FAR_OFF < self.value:
            self.value = measured
        self.value += WEIGHT * (measured - self.value)
        self._doubted = False


class PrefillSpeed:
    """Seconds per prompt token of an engine that computes prompts one after the other."""

    def __init__(self) -> None:
        self.token_seconds = LearnedMean()
        self._usual = 0.0
        """mean tokens of a prompt"""
        self._free = 0.0
        """monotonic seconds when the last prompt was done"""
        self._tokens, self._seconds, self._whole = 0, 0.0, False
        """of the prompts done in a row, and whether all of their computation is in the seconds"""

    def done(self, tokens: int, since: float, now: float) -> None:
        """Prompts of `tokens` together were done at `now`; the first of them arrived at `since`. A prompt that arrived
        while others were computed may have been computed beside them in part, so only a row can be measured."""
        self._usual += (WEIGHT if self._usual else 1.0) * (tokens - self._usual)
        in_a_row = since < self._free
        if not in_a_row or self._tokens > LONGEST_ROW * self._usual:
            self._tokens, self._seconds, self._whole = 0, 0.0, not in_a_row
        self._tokens += tokens
        self._seconds, self._free = self._seconds + now - max(since, self._free), now
        if self._seconds > 0 and self._tokens >= max(SHORTEST, (0.5 if self._whole else 3) * self._usual):
            self.token_seconds.learn(self._seconds / self._tokens, now)


def decayed(value: float | None, age: float, other: float | None) -> float | None:
    """What to expect of a value measured `age` seconds ago, where the alternative takes `other`. A worse value moves
    towards `other` with its age: it may have become as good by now, which only a try shows. A better one stays."""
    if value is None or other is None or value <= other:
        return other if value is None else value
    return other + (value - other) * float(0.5 ** (age / HALF_LIFE))
