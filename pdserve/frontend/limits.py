"""What a frontend takes on at once, and for how long."""

import time
from dataclasses import dataclass

from pdserve.errors import Overloaded
from pdserve.frontend.body import Refusal

MAX_TIMEOUT = 24 * 3600.0


@dataclass(frozen=True)
class Limits:
    """Per model and frontend process."""

    in_flight: int = 1024
    """sequences; a request with n > 1 is n of them"""
    queued_tokens: int = 1_000_000
    """prompt tokens that wait for their first output token"""


def admit(limits: Limits, in_flight: int, queued_tokens: int) -> None:
    """Raises Overloaded where one more request would be too much."""
    if in_flight >= limits.in_flight:
        raise Overloaded(f"{in_flight} requests are in flight, and {limits.in_flight} is the limit")
    if queued_tokens >= limits.queued_tokens:
        raise Overloaded(
            f"prompts of {queued_tokens} tokens are queued, and {limits.queued_tokens} is the limit", 2.0
        )


def deadline(asked: str | None, default: float) -> float:
    """Unix seconds, from the header `x-request-timeout` (seconds) or the configured default. Raises
    Refusal."""
    if asked is None:
        return time.time() + default
    try:
        seconds = float(asked)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT:  # also catches NaN
        message = f"x-request-timeout must be a number of seconds above 0 and up to {MAX_TIMEOUT:.0f}"
        raise Refusal(400, message, "x-request-timeout")
    return time.time() + seconds
