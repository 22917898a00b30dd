"""What it would cost to prefill a prompt here, and to have it prefilled by a prefill worker: pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.messages import PrefillLoad

WAIT_WEIGHT = 3.0
"""of a second that the prompt waits for those before it: a queue that is long now will be so for those that come after
it, and be longer by this prompt"""
STALL_WEIGHT = 0.25
"""of a second that a running stream loses, in chunks that are too short to be felt; both weights were found by
simulation and measured (docs/decisions/0025-adaptive.md)"""


@dataclass(frozen=True)
class Estimates:
    """In seconds."""

    wait_here: float
    """for prompts that this engine computes already"""
    compute_here: float
    stall: float
    """that each running stream loses by it, in chunks"""
    streams: int
    wait_there: float
    compute_there: float
    handover: float
    """from the answer to the next token: transfer of the KV, and a step of this engine"""

    @property
    def local(self) -> float:
        """Weighted, as `remote`: to be compared with it."""
        return WAIT_WEIGHT * self.wait_here + self.compute_here + STALL_WEIGHT * self.streams * self.stall

    @property
    def remote(self) -> float:
        return WAIT_WEIGHT * self.wait_there + self.compute_there + self.handover

    @property
    def idle(self) -> bool:
        """Nothing here would be delayed by it."""
        return not self.streams and not self.wait_here

    def __str__(self) -> str:
        return (
            f"local costs {_ms(self.local)} ms (wait {WAIT_WEIGHT:g} x {_ms(self.wait_here)}, compute "
            f"{_ms(self.compute_here)}, stall {STALL_WEIGHT:g} x {self.streams} streams x {_ms(self.stall)}), remote "
            f"{_ms(self.remote)} ms (wait {WAIT_WEIGHT:g} x {_ms(self.wait_there)}, compute "
            f"{_ms(self.compute_there)}, handover {_ms(self.handover)})"
        )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


@dataclass(frozen=True)
class SeenLoad:
    """What a prefill worker said of itself when it last pulled."""

    load: PrefillLoad
    age: float
    """seconds ago"""

    def left(self, own: int, token_seconds: float) -> tuple[float, float]:
        """Tokens that it has yet to compute, and its seconds for a token. `own` are tokens that this decode worker
        knows to be in its hands. Where they should be done and are not, it has become slow, or hangs."""
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
    """`compute` of the tokens of the prompt are not in the prefix cache here. `here`: seconds for a token; `there`: of
    each prefill worker, the tokens in its hands and its seconds for a token; at least one. `queued`: tokens before this
    prompt that no prefill worker has pulled."""
    speed = sum(1 / seconds for _, seconds in there)
    ahead = queued + sum(tokens for tokens, _ in there)
    return Estimates(
        wait_here=ahead_here * here,
        compute_here=compute * here,
        stall=compute * here,
        streams=streams,
        wait_there=ahead / speed,
        compute_there=prompt * len(there) / speed,
        handover=handover,
    )
