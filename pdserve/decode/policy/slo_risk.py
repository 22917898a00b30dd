"""Expected SLO misses of a prefill, and the chunk size with which decoding sequences keep their gaps. Pure.

The misses are a sum of probabilities: of the prompt's own request, and of each other request of this engine that has
kept its SLO so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.contract.slo import GAP_VARIATION, gap_miss_probability, ttft_miss_probability

MAX_STEP = 0.028
"""Target seconds of a step with a chunk if no decoding sequence has an SLO."""
MAX_STEP_FACTOR = 2
"""The target is at least this multiple of a step without chunks."""
MIN_CHUNK_PART = 4
"""If no decoding sequence has an SLO, the chunk is at least the usual one divided by this."""


def longest_step(gap: float, plain: float) -> float:
    """Return the mean seconds that a step with a chunk may take to keep this gap; infinite if a step without chunks
    (`plain`) misses it already."""
    return (1 - GAP_VARIATION) * gap if plain < gap else math.inf


def chunk_of(step: float, plain: float, token_seconds: float, usual: int, block: int) -> int:
    """Return the prompt tokens that make a step take `step` seconds, but at least `block`. Return `usual` if `step` is
    infinite or a speed is unknown (0). `usual` 0: prompts are not cut into chunks."""
    if not usual or step == math.inf or not plain or not token_seconds:
        return usual
    return max(block, int((step - plain) / token_seconds))


def chunk_without_slo(plain: float, token_seconds: float, usual: int, block: int) -> int:
    """Return the chunk if no decoding sequence has an SLO; at most `usual`."""
    chunk = chunk_of(max(MAX_STEP, MAX_STEP_FACTOR * plain), plain, token_seconds, usual, block)
    return min(usual, max(usual // MIN_CHUNK_PART, chunk))


@dataclass(frozen=True)
class SloRisk:
    """Times are in seconds; those of an SLO are infinite without one. The first gap is not at risk: the frontend holds
    the first token back until the second has come (`frontend/sequence/pacing.py`)."""

    left: float
    """Until the TTFT deadline of the prompt's request."""
    gap: float
    """The longest gap that the request's SLO allows."""
    plain: float
    """Mean of a step without chunks."""
    step: float
    """Mean of a step with a chunk."""
    gaps: Sequence[float] = ()
    """SLO gaps of the engine's other requests that have kept their SLO so far."""

    def local_misses(self, wait: float, compute: float) -> float:
        return self._own(wait + compute) + sum(gap_miss_probability(self.step, gap) for gap in self.gaps)

    def remote_misses(self, ttft: float) -> float:
        return self._own(ttft)

    def _own(self, ttft: float) -> float:
        kept = 1 - ttft_miss_probability(ttft, self.left)
        return 1 - kept * (1 - gap_miss_probability(self.plain, self.gap))
