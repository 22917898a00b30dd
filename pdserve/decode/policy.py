"""Local or remote prefill: a pure decision over what the decode worker knows at that moment."""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["local", "remote"]


@dataclass(frozen=True)
class Settings:
    """The `VllmWorker` section's keys of the same names; the two thresholds can change while the worker
    runs."""

    remote_prefill: bool = True
    conditional_disagg: bool = True
    max_local_prefill_length: int = 512
    max_prefill_queue_size: int = 10


@dataclass(frozen=True)
class Decision:
    mode: Mode
    reason: str
    """one word, a metric's label"""


def decide(
    prompt_len: int,
    prefix_hit: int,
    queue_depth: int,
    prefill_workers: int,
    queue_connected: bool,
    settings: Settings,
    *,
    supported: bool = True,
    migrated: bool = False,
    fits: bool = True,
) -> Decision:
    """Remote where the prompt, less what the prefix cache has of it, is longer than this worker should
    compute beside its decodes, and the queue is short enough that waiting is likely to pay.

    `supported` is false for a request whose prompt needs more than its KV (prompt logprobs, images), and `migrated`
    true for one that was lost together with a worker: perhaps by the KV that this had read. `fits` is false for one
    that is larger than a message in the queue may be.
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
    if prompt_len - prefix_hit <= settings.max_local_prefill_length:
        return Decision("local", "short")
    if queue_depth >= settings.max_prefill_queue_size:
        return Decision("local", "queue-full")
    return Decision("remote", "long")
