"""Costs of a local and of a remote prefill, in seconds of delay summed over all requests. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.contract.messages import PrefillLoad
from pdserve.contract.slo import MIN_MISS_DIFFERENCE

MIN_SAVING = 0.002
"""Seconds that a worker with the prefix must save. Else the prompt is queued, and the first idle worker pulls it."""
MIN_SHARE = 0.1
"""Share of a prompt's computing time that a worker with the prefix must save."""
MIN_BEGIN = 1.0
"""Seconds that an idle worker with the prefix gets to begin a prompt."""
WAIT_FACTOR = 3.0
"""A busy worker gets `MIN_BEGIN` and this many times its expected wait: other decode workers send it prompts, too."""
LATER_PROMPTS = 2.0
"""Each prompt that arrives while another waits counts as this many delayed prompts: it delays others in turn."""


@dataclass(frozen=True)
class Estimates:
    """Times are in seconds."""

    local_wait: float
    """Wait for prompts that this engine computes first."""
    local_compute: float
    streams: int
    """Sequences that this engine decodes."""
    remote_wait: float
    remote_compute: float
    handover: float
    """From the prefill worker's answer to the next token: KV transfer and a step of this engine."""
    local_stall: float
    """Seconds that each decoding sequence loses by a local prefill."""
    rate: float = 0.0
    """Prompts that arrive per second."""
    remote_stall: float = 0.0
    """Seconds that each decoding sequence loses by a remote prefill. Above 0 if both engines share cores."""
    slo_misses: tuple[float, float] | None = None
    """Expected SLO misses of a local and of a remote prefill; None without an SLO."""
    prefix: "PrefixChoice | None" = None
    """Set if a prefill worker is cheaper than the queue because of its prefix cache. Then `remote_wait` and
    `remote_compute` are that worker's."""

    @property
    def local_cost(self) -> float:
        """A second of delay costs the same for this prompt, a decoding sequence and a later prompt."""
        wait = self._weight(self.local_compute) * self.local_wait
        return wait + self.local_compute + self.streams * self.local_stall

    @property
    def remote_cost(self) -> float:
        wait = self._weight(self.remote_compute) * self.remote_wait
        return wait + self.remote_compute + self.handover + self.streams * self.remote_stall

    def _weight(self, compute: float) -> float:
        """Cost of a second of this prompt's wait: prompts that arrive in it wait until this one is computed."""
        return 1 + LATER_PROMPTS * self.rate * compute

    @property
    def is_idle(self) -> bool:
        """Whether a local prefill would delay nothing."""
        return not self.streams and not self.local_wait

    @property
    def better(self) -> Literal["local", "remote"]:
        """Remote if that misses fewer SLOs by more than `MIN_MISS_DIFFERENCE`; else the cheaper way. If a local prefill
        avoids one miss, it may cost twice as much (docs/decisions/0085-what-a-promise-kept-here-may-cost.md)."""
        local, remote = self.slo_misses or (0.0, 0.0)
        if local > remote + MIN_MISS_DIFFERENCE:
            return "remote"
        return "remote" if self.remote_cost * (1 + remote - local) < self.local_cost else "local"

    def __str__(self) -> str:
        misses = (
            "SLO misses {:.2f} local, {:.2f} remote; ".format(*self.slo_misses) if self.slo_misses else ""
        )
        return (
            f"{misses}"
            f"local costs {_ms(self.local_cost)} ms (wait {self._weight(self.local_compute):.1f} x "
            f"{_ms(self.local_wait)}, compute {_ms(self.local_compute)}, slows {self.streams} sequences by "
            f"{_ms(self.local_stall)}), remote {_ms(self.remote_cost)} ms (wait "
            f"{self._weight(self.remote_compute):.1f} x {_ms(self.remote_wait)}, compute "
            f"{_ms(self.remote_compute)}, slows {self.streams} sequences by {_ms(self.remote_stall)}, handover "
            f"{_ms(self.handover)}){f'; {self.prefix}' if self.prefix else ''}"
        )


@dataclass(frozen=True)
class PrefixChoice:
    """A prompt's prefill worker, chosen because it has a prefix of the prompt cached."""

    worker: str
    cached: int
    """Prompt tokens that it has cached."""
    saves: float
    """Seconds of delay, summed over this and later prompts, that it saves against the queue."""
    begin_within: float
    """Seconds in which it must begin the prompt. After them any worker may."""

    def __str__(self) -> str:
        return f"{self.worker} has {self.cached} tokens cached and saves {_ms(self.saves)} ms"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


@dataclass(frozen=True)
class RemoteWorker:
    """A prefill worker's load, speed and prefix hit for one prompt."""

    id: str
    ahead: float
    """Prompt tokens that it computes first."""
    token_seconds: float
    cached: int = 0
    """Tokens of the prompt that are in its prefix cache."""

    @property
    def wait(self) -> float:
        return self.ahead * self.token_seconds

    def compute(self, prompt: int) -> float:
        return (prompt - self.cached) * self.token_seconds


@dataclass(frozen=True)
class SeenLoad:
    """A prefill worker's last known load."""

    load: PrefillLoad
    age: float
    """Seconds since the report."""

    def left(self, own: int, token_seconds: float) -> tuple[float, float]:
        """Return the tokens that the prefill worker has yet to compute, and its seconds per token. `own`: tokens of
        this decode worker's prompts there. If the prompts are overdue, the worker counts as slower than reported."""
        left = self.load.tokens - self.age / token_seconds
        if left >= 0 or not own:
            return max(left, 0.0), token_seconds
        late = self.age / self.load.tokens if self.load.tokens else token_seconds
        return min(own, -left), max(token_seconds, late)


def _mean_compute(prompt: int, remote: Sequence[RemoteWorker]) -> float:
    """Return the seconds to compute a prompt, as the mean over the workers weighted by their speeds."""
    speed = sum(1 / each.token_seconds for each in remote)
    return sum(each.compute(prompt) / each.token_seconds for each in remote) / speed


def prefix_choice(
    prompt: int, remote: Sequence[RemoteWorker], queued: float, rate: float
) -> PrefixChoice | None:
    """Return the worker that should compute the prompt because of its prefix cache; None if any worker may.

    A queued prompt goes to the first idle worker and finds the average prefix hit there. So if all workers have the
    prefix, the queue is best: it needs no guess which worker is idle first. The wait for queued prompts is not added to
    the cost of the queue, because overtaking them is no reason to choose a worker.

    A second of computing also delays prompts that arrive before its end, so it costs more than a second of waiting. A
    prefix that is a small part of the prompt (a system prompt) does not decide: workers without it would get no prompts
    and never cache it."""
    speed = sum(1 / each.token_seconds for each in remote)
    first, usual = min(each.wait for each in remote), _mean_compute(prompt, remote)

    def delay(wait: float, compute: float) -> float:
        return wait + compute * (1 + rate * (compute + LATER_PROMPTS * (queued / speed + first)))

    def cost(worker: RemoteWorker) -> float:
        return delay(worker.wait, worker.compute(prompt))

    anywhere = delay(first, usual)
    holders = (each for each in remote if each.cached and each.compute(prompt) < (1 - MIN_SHARE) * usual)
    best = min(holders, key=cost, default=None)
    if best is None or cost(best) + MIN_SAVING > anywhere:
        return None
    return PrefixChoice(best.id, best.cached, anywhere - cost(best), MIN_BEGIN + WAIT_FACTOR * best.wait)


def estimate(
    compute: int,
    prompt: int,
    *,
    streams: int,
    local_ahead: int,
    local_token: float,
    queued: float,
    remote: Sequence[RemoteWorker],
    handover: float,
    step_token: float | None = None,
    rate: float = 0.0,
    slowdown: float = 0.0,
) -> Estimates:
    """`compute`: tokens of the prompt that are not in the local prefix cache; `local_ahead`: tokens that this engine
    computes first; `local_token`: its seconds per token; `queued`: tokens before this prompt that no prefill worker
    has pulled; `remote`: at least one prefill worker; `step_token`: measured seconds that each prompt token adds to a
    step that also decodes; `rate`: prompts per second; `slowdown`: share of its time that a decoding sequence loses
    during a remote prefill."""
    speed = sum(1 / each.token_seconds for each in remote)
    wait = (queued + sum(each.ahead for each in remote)) / speed
    remote_compute = _mean_compute(prompt, remote)
    if choice := prefix_choice(prompt, remote, queued, rate):
        chosen = next(each for each in remote if each.id == choice.worker)
        wait, remote_compute = chosen.wait, chosen.compute(prompt)
    return Estimates(
        local_wait=local_ahead * local_token,
        local_compute=compute * local_token,
        streams=streams,
        remote_wait=wait,
        remote_compute=remote_compute,
        handover=handover,
        local_stall=compute * (step_token or local_token),
        rate=rate,
        remote_stall=remote_compute * slowdown,
        prefix=choice,
    )
