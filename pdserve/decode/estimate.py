"""The costs of prefilling a prompt here, and at the prefill workers: pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.decode.promises import MATTERS
from pdserve.messages import PrefillLoad

WAIT_WEIGHT = 3.0
"""cost of a second that the prompt waits for others: a queue that is long now delays later prompts too, and this prompt
makes it longer"""
STALL_WEIGHT = 0.25
"""cost of a second that a running stream loses, in chunks too short to be felt. Both weights were found by simulation
and confirmed by measurement (docs/decisions/0025-adaptive.md)"""


@dataclass(frozen=True)
class Estimates:
    """In seconds."""

    wait_here: float
    """for prompts that this engine computes already"""
    compute_here: float
    """which each running stream loses too, in chunks"""
    streams: int
    """running here"""
    wait_there: float
    compute_there: float
    handover: float
    """from the answer to the next token: transfer of the KV, and a step of this engine"""
    breaks: tuple[float, float] | None = None
    """promises that are expected to break if the prompt is computed here, and there; None: nothing is promised"""

    @property
    def local(self) -> float:
        """Weighted, to be compared with `remote`."""
        return WAIT_WEIGHT * self.wait_here + (1 + STALL_WEIGHT * self.streams) * self.compute_here

    @property
    def remote(self) -> float:
        return WAIT_WEIGHT * self.wait_there + self.compute_there + self.handover

    @property
    def idle(self) -> bool:
        """Whether computing here would delay nothing."""
        return not self.streams and not self.wait_here

    @property
    def better(self) -> Literal["here", "there"]:
        """Where fewer promises are expected to break, or else where it costs less: with a promise, an idle engine's
        own computing costs nothing."""
        if self.breaks is not None:
            here, there = self.breaks
            if abs(here - there) > MATTERS:
                return "here" if here < there else "there"
            if self.idle:
                return "here"
        return "there" if self.remote < self.local else "here"

    def __str__(self) -> str:
        breaks = "breaks {:.2f} promises here, {:.2f} there; ".format(*self.breaks) if self.breaks else ""
        return (
            f"{breaks}"
            f"local costs {_ms(self.local)} ms (wait {WAIT_WEIGHT:g} x {_ms(self.wait_here)}, compute "
            f"{_ms(self.compute_here)}, stall {STALL_WEIGHT:g} x {self.streams} streams x {_ms(self.compute_here)}), "
            f"remote {_ms(self.remote)} ms (wait {WAIT_WEIGHT:g} x {_ms(self.wait_there)}, compute "
            f"{_ms(self.compute_there)}, handover {_ms(self.handover)})"
        )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


@dataclass(frozen=True)
class SeenLoad:
    """The load that a prefill worker reported when it last pulled."""

    load: PrefillLoad
    age: float
    """seconds since the report"""

    def left(self, own: int, token_seconds: float) -> tuple[float, float]:
        """Tokens that the worker has yet to compute, and its seconds for a token. `own` are tokens of this decode
        worker's requests there: if they should be done by now and are not, the worker has become slow, or hangs."""
        left = self.load.tokens - self.age / token_seconds
        if left >= 0 or not own:
            return max(left, 0.0), token_seconds
        late = self.age / self.load.tokens if self.load.tokens else token_seconds
        return min(own, -left), max(token_seconds, late)


def estimate(
    compute: int,
    prompt: int,
    *,
    streams: int,
    ahead_here: int,
    here: float,
    queued: float,
    there: Sequence[tuple[float, float]],
    handover: float,
) -> Estimates:
    """`compute`: tokens of the prompt that are not in the prefix cache here; `here`: seconds for a token here; `there`:
    of each prefill worker (at least one), the tokens that it has and its seconds for a token; `queued`: tokens before
    this prompt that no prefill worker has pulled."""
    speed = sum(1 / seconds for _, seconds in there)
    ahead = queued + sum(tokens for tokens, _ in there)
    return Estimates(
        wait_here=ahead_here * here,
        compute_here=compute * here,
        streams=streams,
        wait_there=ahead / speed,
        compute_there=prompt * len(there) / speed,
        handover=handover,
    )
