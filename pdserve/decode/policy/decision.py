"""Chooses local or remote prefill, and the time that a remote prefill may take. Pure."""

from dataclasses import dataclass
from typing import Literal

from pdserve.config.schema import DecodeSection
from pdserve.decode.policy.cost import Estimates

Mode = Literal["local", "remote"]

PREFIX = "prefix-cached"
"""Reason of a remote prefill at the worker that has the prompt's prefix cached."""

MIN_TIMEOUT = 2.0
"""Seconds of a timeout that cover messages and scheduling, however short the prompt is."""
TIMEOUT_FACTOR = 4.0
"""Multiple of the expected time that a timeout adds to `MIN_TIMEOUT`."""
FIRST_GUESS = 500.0
"""Assumed prompt tokens per second before the first measurement. It is low, so that slow workers do not time out."""
_WEIGHT = 0.2
"""Weight of the newest prefill in the means."""


@dataclass(frozen=True)
class Decision:
    mode: Mode
    reason: str
    """Label of `pdserve_prefill_total`."""


def decide(
    prompt_len: int,
    prefix_hit: int,
    queue_depth: int,
    prefill_workers: int,
    queue_connected: bool,
    settings: DecodeSection,
    *,
    supported: bool = True,
    migrated: bool = False,
    fits: bool = True,
    estimates: Estimates | None = None,
) -> Decision:
    """Policy `threshold` chooses remote if the queue is short and the prompt, without its prefix hit, is longer than
    `max_local_prefill_length`. Policy `adaptive` chooses `estimates.better`. Without `conditional_disagg`, all prompts
    are remote.

    `supported` is false if the request needs more than its prompt's KV (prompt logprobs). A `migrated` one is local,
    because the KV that the lost worker read may have killed it. `fits` is false if the request is too large for the
    queue, or its prompt for a prefill worker."""
    must_be_local = {
        "disabled": not settings.remote_prefill,
        "unsupported": not supported,
        "migrated": migrated,
        "queue-down": not queue_connected,
        "no-prefill-worker": not prefill_workers,
        "too-large": not fits,
    }
    if reason := next((reason for reason, holds in must_be_local.items() if holds), None):
        return Decision("local", reason)
    prefix = PREFIX if estimates is not None and estimates.prefix else ""
    if not settings.conditional_disagg:
        return Decision("remote", prefix or "always")
    if settings.policy == "adaptive" and estimates is not None:
        if estimates.better == "remote":
            return Decision("remote", prefix or "remote-cheaper")
        return Decision("local", "idle" if estimates.is_idle else "local-cheaper")
    if prompt_len - prefix_hit <= settings.max_local_prefill_length:
        return Decision("local", "short")
    if queue_depth >= settings.max_prefill_queue_size:
        return Decision("local", "queue-full")
    return Decision("remote", prefix or "long")


def queue_limit(settings: DecodeSection) -> int:
    """Queue depth at which prompts are prefilled locally; 0: no limit."""
    limited = settings.remote_prefill and settings.conditional_disagg and settings.policy != "adaptive"
    return settings.max_prefill_queue_size if limited else 0


class PrefillTimeout:
    """Computes a remote prefill's timeout from the prefill workers' measured speed."""

    def __init__(self) -> None:
        self._rate = FIRST_GUESS
        self._tokens = 0.0
        """Mean tokens of a measured prefill; 0: none was measured."""

    def learn(self, tokens: int, seconds: float) -> None:
        """Record a prefill of `tokens` that took `seconds` in the prefill engine."""
        if seconds <= 0:
            return
        rate = tokens / seconds
        if not self._tokens:
            self._rate, self._tokens = rate, float(tokens)
        self._rate += _WEIGHT * (rate - self._rate)
        self._tokens += _WEIGHT * (tokens - self._tokens)

    def seconds(self, tokens: int, queue_depth: int, workers: int) -> float:
        """Seconds allowed from publishing the request to its answer."""
        ahead = queue_depth * (self._tokens or tokens) / max(workers, 1)
        return MIN_TIMEOUT + TIMEOUT_FACTOR * (tokens + ahead) / self._rate
