"""The number of broken promises to expect where a prompt is computed here, and at a prefill worker: pure.

Of the prompt's own request, of those that run or wait here, and of those that wait for prefill workers: each counts
with the probability that this prompt makes it break a promise that it has kept so far."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.slo import UNEVEN, late, torn


def longest_step(gap: float, plain: float) -> float:
    """Seconds that a step with a chunk may take as a mean, so that this gap is kept; infinite if it breaks in any case:
    `plain` is a step without one."""
    return (1 - UNEVEN) * gap if plain < gap else math.inf


def longest_first(gap: float, handover: float) -> float:
    """As `longest_step`, for a request whose KV comes: it waits for half of a step, and for the handover."""
    return max(0.0, 2 * ((1 - UNEVEN) * gap - handover)) if handover < gap else math.inf


def chunk_of(step: float, plain: float, token_seconds: float, usual: int, block: int) -> int:
    """Return the tokens of prompts with which a step takes as long; infinite: nothing has to be kept. `usual` 0:
    prompts are computed whole."""
    if not usual or step == math.inf or not plain or not token_seconds:
        return usual
    return max(block, int((step - plain) / token_seconds))


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
    beside: float
    """of one while KV comes, for which it may be shorter"""
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
        return self.handover + self.beside / 2

    def _held_up(self, gap: float) -> float:
        """The probability that chunks make a request with this promise break it, whose KV comes."""
        return torn(self._second, gap) - torn(self.handover, gap)

    def _own(self, first: float, longest: float) -> float:
        return 1 - (1 - late(first, self.left)) * (1 - torn(longest, self.gap))


def _delayed(waiting: Iterable[tuple[float, float]], seconds: float) -> float:
    return sum(late(expected + seconds, left) - late(expected, left) for expected, left in waiting)
