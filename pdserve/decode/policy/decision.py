"""Local or remote prefill, and how long a remote prefill may take: pure decisions."""

from dataclasses import dataclass
from typing import Literal

from pdserve.config.schema import DecodeSection
from pdserve.decode.policy.cost import Estimates

Mode = Literal["local", "remote"]

FLOOR = 2.0
"""seconds that any remote prefill may take: messages, scheduling, a busy machine"""
SLACK = 4.0
"""multiple of the expected time after which a prefill is given up"""
FIRST_GUESS = 500.0
"""tokens per second, until a prefill was measured; low, so that a slow machine's first prompt is not computed twice"""
_WEIGHT = 0.2
"""of the newest prefill in the means"""


@dataclass(frozen=True)
class Decision:
    mode: Mode
    reason: str
    """one word, a label of `pdserve_prefill_total`"""


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
    """Policy `threshold`: remote if the prompt, less its prefix hit, is longer than this worker should compute beside
    its decodes, and the queue is short. Policy `adaptive`: the cheaper way, by `estimates`.

    `supported` is false for a request whose prompt needs more than its KV (prompt logprobs). `migrated` is true
    for a request that was lost with a worker, perhaps because of the KV that the worker had read. `fits` is false for a
    request that is larger than a message of the queue may be, or longer than the prefill workers' max-model-len.
    """
    if not settings.remote_prefill:
        return Decision("local", "disabled")
    if not supported:
        return Decision("local", "unsupported")
    if migrated:
        return Decision("local", "migrated")
    if not queue_connected:
        return Decision("local", "queue-down")
    if not prefill_workers:
        return Decision("local", "no-prefill-worker")
    if not fits:
        return Decision("local", "too-large")
    if not settings.conditional_disagg:
        return Decision("remote", "always")
    if settings.policy == "adaptive" and estimates is not None:
        if estimates.better == "there":
            return Decision("remote", "remote-cheaper")
        return Decision("local", "idle" if estimates.idle else "local-cheaper")
    if prompt_len - prefix_hit <= settings.max_local_prefill_length:
        return Decision("local", "short")
    if queue_depth >= settings.max_prefill_queue_size:
        return Decision("local", "queue-full")
    return Decision("remote", "long")


def queue_limit(settings: DecodeSection) -> int:
    """The queue depth from which on prompts are prefilled locally; 0: no such limit."""
    limited = settings.remote_prefill and settings.conditional_disagg and settings.policy != "adaptive"
    return settings.max_prefill_queue_size if limited else 0


class PrefillTimeout:
    """The bound of a prefill, by the prefill workers' speed as learned from answers, for it and those queued before."""

    def __init__(self) -> None:
        self._rate = FIRST_GUESS
        self._tokens = 0.0
        """prompt tokens of an average request; 0: none was measured"""

    def learn(self, tokens: int, seconds: float) -> None:
        """A prefill of `tokens` took `seconds` in the prefill engine, beside others."""
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
        return FLOOR + SLACK * (tokens + ahead) / self._rate
