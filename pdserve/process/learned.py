"""Running means of prefill times, learned from the prefills that a worker sees. Pure: callers pass the time.

Some measurements are outliers: a KV read that stalled, a busy machine. Speeds also change for good. So a value far
above the mean counts only if the next one confirms it, and the value of a slow path decays, so that it is tried again.
"""

from dataclasses import dataclass

WEIGHT = 0.2
"""Weight of the newest measurement in the mean."""
FAR_OFF = 3.0
"""Factor from the mean beyond which a measurement is a change of speed or an outlier, not noise."""
MAX_ROW = 8
"""A row of prompts (`PrefillSpeed`) ends when it has more tokens than this many average calls of `done`."""
MIN_MEASURED_TOKENS = 256
"""Fewest tokens of a measurement: with fewer, the fixed cost of a step dominates."""
HALF_LIFE = 10.0
"""Seconds in which a value moves halfway to a better alternative."""


@dataclass
class LearnedMean:
    """A running mean of seconds."""

    value: float | None = None
    """None before the first measurement."""
    at: float = 0.0
    """Monotonic seconds of the last measurement."""
    _has_outlier: bool = False
    """The last measurement was far above the mean, and did not count."""

    def learn(self, measured: float, now: float) -> None:
        self.at = now
        far_off = self.value is not None and measured > FAR_OFF * self.value
        if far_off and not self._has_outlier:
            self._has_outlier = True
            return
        if self.value is None or far_off or measured * FAR_OFF < self.value:
            self.value = measured
        self.value += WEIGHT * (measured - self.value)
        self._has_outlier = False


class PrefillSpeed:
    """Seconds per prompt token of an engine that computes prompts one after the other."""

    def __init__(self) -> None:
        self.token_seconds = LearnedMean()
        self._usual = 0.0
        """Mean `tokens` of `done`."""
        self._free = 0.0
        """Monotonic seconds of the end of the last prompt."""
        self._tokens, self._seconds = 0, 0.0
        """Tokens and seconds of the row: prompts that were computed without a pause between them."""
        self._whole = False
        """Whether the engine was idle before the row, so that the row's seconds contain all of its computation."""

    def done(self, tokens: int, since: float, now: float) -> None:
        """Record that prompts of `tokens` in total were done at `now`; the first of them arrived at `since`. Prompts in
        a row are measured together, because an engine may compute the end of one and the start of the next at once."""
        self._usual += (WEIGHT if self._usual else 1.0) * (tokens - self._usual)
        in_a_row = since < self._free
        if not in_a_row or self._tokens > MAX_ROW * self._usual:
            self._tokens, self._seconds = 0, 0.0
            self._whole = not in_a_row
        self._tokens += tokens
        self._seconds += now - max(since, self._free)
        self._free = now
        if self._seconds > 0 and self._tokens >= max(
            MIN_MEASURED_TOKENS, (0.5 if self._whole else 3) * self._usual
        ):
            self.token_seconds.learn(self._seconds / self._tokens, now)


def decayed(value: float | None, age: float, other: float | None) -> float | None:
    """Move a value that was measured `age` seconds ago towards `other`, the time of the alternative path, if the value
    is worse: the measured path may have become faster, and only another try shows that."""
    if value is None or other is None or value <= other:
        return other if value is None else value
    return other + (value - other) * float(0.5 ** (age / HALF_LIFE))
