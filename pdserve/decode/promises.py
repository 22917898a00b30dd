"""The number of broken promises to expect where a prompt is computed here, and at a prefill worker: pure.

Of the prompt's own request, of those that run or wait here, and of those that wait for prefill workers: each counts
with the probability that this prompt makes it break a promise that it has kept so far."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

UNSURE = 0.4
"""of the time to a first token: part by which it may be shorter or longer than expected; others come meanwhile"""
UNEVEN = 0.3
"""of a step with a chunk of a prompt in it: part by which the longest of several is longer than the mean"""
MATTERS = 0.05
"""a smaller difference in expected broken promises decides nothing"""


def late(seconds: float, left: float) -> float:
    """The probability that a first token, expected in so many seconds, comes later than `left` seconds from now."""
    if left <= 0:
        return 1.0
    return _ramp(seconds / left, 1 - UNSURE, 1 + UNSURE)


def torn(seconds: float, gap: float) -> float:
    """The probability that a gap, of so many seconds as a mean, is longer than the promised one."""
    return _ramp(seconds / gap, 1 - UNEVEN, 1.0)


def _ramp(value: float, none: float, sure: float) -> float:
    return min(1.0, max(0.0, (value - none) / (sure - none)))


@dataclass(frozen=True)
class Stakes:
    """What may break. Times in seconds; infinite where nothing is promised."""

    left: float
    """until the first token of the prompt's request is due"""
    gap: float
    """promised to it"""
    plain: float
    """of a step without chunks of prompts, as a mean"""
    step: float
    """of a step with a chunk in it, as a mean"""
    chunks: bool
    """whether other prompts are still computed here when the KV comes from a prefill worker"""
    handover: float
    """from the first token of a request that is prefilled elsewhere to its second, without chunks"""
    gaps: Sequence[float] = ()
    """promised to the requests that run here, or will, without KV from elsewhere, and kept so far"""
    coming: Sequence[float] = ()
    """promised to those whose KV will come"""
    newcomers: float = 0.0
    """requests that come, and get their KV, while the prompt is computed here"""
    here: Sequence[tuple[float, float]] = ()
    """prompts that wait here behind this one: when their first tokens are expected, and when they are due"""
    there: Sequence[tuple[float, float]] = ()
    """prompts that wait for prefill workers behind this one"""

    def broken_here(self, wait: float, compute: float) -> float:
        streams = sum(torn(self.step, gap) for gap in self.gaps)
        coming = sum(map(self._held_up, self.coming)) + self.newcomers * self._held_up(self.gap)
        return self._own(wait + compute, self.plain) + streams + coming + _delayed(self.here, compute)

    def broken_there(self, wait: float, compute: float, spread: float) -> float:
        """`spread`: seconds that the others wait longer."""
        second = self._second if self.chunks else self.handover
        return self._own(wait + compute, max(second, self.plain)) + _delayed(self.there, spread)

    @property
    def _second(self) -> float:
        """As `handover`, behind what is left of a step with a chunk."""
        return self.handover + self.step / 2

    def _held_up(self, gap: float) -> float:
        """The probability that chunks make a request with this promise break it, whose KV comes."""
        return torn(self._second, gap) - torn(self.handover, gap)

    def _own(self, first: float, longest: float) -> float:
        return 1 - (1 - late(first, self.left)) * (1 - torn(longest, self.gap))


def _delayed(waiting: Iterable[tuple[float, float]], seconds: float) -> float:
    return sum(late(expected + seconds, left) - late(expected, left) for expected, left in waiting)
