"""The number of broken promises to expect where a prompt is computed here, and at a prefill worker: pure.

Of the prompt's own request, of those that run or wait here, and of those that wait for prefill workers: each counts
with the probability that this prompt makes it break a promise that it has kept so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.contract.slo import GAP_VARIATION, gap_miss_probability, ttft_miss_probability

COMMON = 0.028
"""seconds of a step with a chunk where no gap is promised: short beside the gaps that are commonly asked for"""
TIMES = 2
"""or so many times a step without one, if that is longer"""
LEAST = 4
"""the chunk is then never less than this part of the usual one, which would take a prompt too many steps"""


def longest_step(gap: float, plain: float) -> float:
    """Seconds that a step with a chunk may take as a mean, so that this gap is kept; infinite if it breaks in any case:
    `plain` is a step without one."""
    return (1 - GAP_VARIATION) * gap if plain < gap else math.inf


def chunk_of(step: float, plain: float, token_seconds: float, usual: int, block: int) -> int:
    """Return the tokens of prompts with which a step takes as long; infinite: no gap can be kept. `usual` 0:
    prompts are computed whole."""
    if not usual or step == math.inf or not plain or not token_seconds:
        return usual
    return max(block, int((step - plain) / token_seconds))


def chunk_without_promise(plain: float, token_seconds: float, usual: int, block: int) -> int:
    """The tokens of prompts in a step with streams to which nothing is promised; never more than usual."""
    chunk = chunk_of(max(COMMON, TIMES * plain), plain, token_seconds, usual, block)
    return min(usual, max(usual // LEAST, chunk))


@dataclass(frozen=True)
class Stakes:
    """What may break. Times in seconds; infinite where nothing is promised. The gap after the first token is not among
    it: that token waits for the second within its own time (`frontend/sequence/pacing.py`)."""

    left: float
    """until the first token of the prompt's request is due"""
    gap: float
    """promised to it"""
    plain: float
    """of a step without chunks of prompts, as a mean"""
    step: float
    """of a step with a chunk in it, as a mean"""
    gaps: Sequence[float] = ()
    """promised to the requests that run here, and kept so far"""

    def broken_here(self, wait: float, compute: float) -> float:
        return self._own(wait + compute) + sum(gap_miss_probability(self.step, gap) for gap in self.gaps)

    def broken_there(self, first: float) -> float:
        """`first`: seconds until its first token."""
        return self._own(first)

    def _own(self, first: float) -> float:
        return 1 - (1 - ttft_miss_probability(first, self.left)) * (
            1 - gap_miss_probability(self.plain, self.gap)
        )
