"""What a worker learns from the prefills that it sees: how long they take. Pure: times come from outside.

Bad measurements happen: a read that stalled, a machine that was busy with other things. Speeds change, too: a worker
gets slow, or its machine gets free. So a value that is far worse than usual is not believed, unless the next one says
the same; and what was bad a while ago may be good by now, which only a try can tell.
"""

from dataclasses import dataclass

WEIGHT = 0.2
"""of the newest measurement"""
FAR_OFF = 3.0
"""factor to the mean, beyond which a measurement is no noise: a change, or a mishap"""
LONGEST_ROW = 8
"""prompts that are measured together"""
SHORTEST = 256
"""tokens of a prompt; with fewer, what is measured is what any step costs"""
HALF_LIFE = 10.0
"""seconds after which half of what was learned is forgotten, where there is reason to hope for better"""


@dataclass
class LearnedMean:
    """Of seconds: the smaller, the better."""

    value: float | None = None
    """None: never measured"""
    at: float = 0.0
    """when it was measured last, in monotonic seconds"""
    _doubted: bool = False
    """the last measurement was far above the mean, and not believed"""

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
    """Seconds for each token of a prompt, of an engine that computes prompts one after the other."""

    def __init__(self) -> None:
        self.token_seconds = LearnedMean()
        self._usual = 0.0
        """tokens of an average prompt"""
        self._free = 0.0
        """monotonic: when the last prompt was done"""
        self._tokens, self._seconds, self._whole = 0, 0.0, False
        """of the prompts that were done in a row, and whether all of their computing is in it"""

    def done(self, tokens: int, since: float, now: float) -> None:
        """Prompts of so many tokens together were done at `now`; the first of them came at `since`. One that came while
        others were computed may have been computed beside them in part, so only a row of them can be measured."""
        self._usual += (WEIGHT if self._usual else 1.0) * (tokens - self._usual)
        in_a_row = since < self._free
        if not in_a_row or self._tokens > LONGEST_ROW * self._usual:
            self._tokens, self._seconds, self._whole = 0, 0.0, not in_a_row
        self._tokens += tokens
        self._seconds, self._free = self._seconds + now - max(since, self._free), now
        if self._seconds > 0 and self._tokens >= max(SHORTEST, (0.5 if self._whole else 3) * self._usual):
            self.token_seconds.learn(self._seconds / self._tokens, now)


def hopeful(value: float | None, age: float, other: float | None) -> float | None:
    """What to expect of a value that was measured `age` seconds ago, where `other` may be had elsewhere. What was bad
    then may have become as good by now, and only a try can tell; what was good stays."""
    if value is None or other is None or value <= other:
        return other if value is None else value
    return other + (value - other) * float(0.5 ** (age / HALF_LIFE))
