"""The costs of prefilling a prompt here, and at the prefill workers: pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.contract.messages import PrefillLoad
from pdserve.contract.slo import MIN_MISS_DIFFERENCE

BEHIND = 2.0
"""prompts that wait behind this one, for each that comes while it is computed: those make others wait in turn"""


@dataclass(frozen=True)
class Estimates:
    """In seconds."""

    wait_here: float
    """for prompts that this engine computes already"""
    compute_here: float
    streams: int
    """running here"""
    wait_there: float
    compute_there: float
    handover: float
    """from the answer to the next token: transfer of the KV, and a step of this engine"""
    stall: float
    """which each running stream loses if the prompt is computed here"""
    rate: float = 0.0
    """prompts that come in a second"""
    stall_there: float = 0.0
    """which each running stream loses if the prompt is computed there: on a core of their own they lose nothing"""
    breaks: tuple[float, float] | None = None
    """promises that are expected to break if the prompt is computed here, and there; None: nothing is promised"""

    @property
    def local(self) -> float:
        """To be compared with `remote`: what all requests lose together. A second of this prompt, of a stream, and of a
        prompt behind this one count the same."""
        wait = self._weight(self.compute_here) * self.wait_here
        return wait + self.compute_here + self.streams * self.stall

    @property
    def remote(self) -> float:
        wait = self._weight(self.compute_there) * self.wait_there
        return wait + self.compute_there + self.handover + self.streams * self.stall_there

    def _weight(self, compute: float) -> float:
        """Of a second that this prompt waits: where it waits, those that come wait longer."""
        return 1 + BEHIND * self.rate * compute

    @property
    def idle(self) -> bool:
        """Whether computing here would delay nothing."""
        return not self.streams and not self.wait_here

    @property
    def better(self) -> Literal["here", "there"]:
        """There, if fewer promises are expected to break there; else where it costs less. For each that is kept here,
        all that runs here ends later: it may cost as much again as the other way."""
        here, there = self.breaks or (0.0, 0.0)
        if here > there + MIN_MISS_DIFFERENCE:
            return "there"
        return "there" if self.remote * (1 + there - here) < self.local else "here"

    def __str__(self) -> str:
        breaks = "breaks {:.2f} promises here, {:.2f} there; ".format(*self.breaks) if self.breaks else ""
        return (
            f"{breaks}"
            f"local costs {_ms(self.local)} ms (wait {self._weight(self.compute_here):.1f} x {_ms(self.wait_here)}, "
            f"compute {_ms(self.compute_here)}, stall {self.streams} streams x {_ms(self.stall)}), "
            f"remote {_ms(self.remote)} ms (wait {self._weight(self.compute_there):.1f} x {_ms(self.wait_there)}, "
            f"compute {_ms(self.compute_there)}, stall {self.streams} streams x {_ms(self.stall_there)}, "
            f"handover {_ms(self.handover)})"
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
    beside: float | None = None,
    rate: float = 0.0,
    lost: float = 0.0,
) -> Estimates:
    """`compute`: tokens of the prompt that are not in the prefix cache here; `here`: seconds for a token here; `there`:
    of each prefill worker (at least one), the tokens that it has and its seconds for a token; `queued`: tokens before
    this prompt that no prefill worker has pulled; `beside`: seconds for a token by which a step with streams is longer,
    if they were measured; `rate`: prompts that come in a second; `lost`: part of its time that
    a stream here loses while a prompt is computed there."""
    speed = sum(1 / seconds for _, seconds in there)
    ahead = queued + sum(tokens for tokens, _ in there)
    compute_there = prompt * len(there) / speed
    return Estimates(
        wait_here=ahead_here * here,
        compute_here=compute * here,
        streams=streams,
        wait_there=ahead / speed,
        compute_there=compute_there,
        handover=handover,
        stall=compute * (beside or here),
        rate=rate,
        stall_there=compute_there * lost,
    )
