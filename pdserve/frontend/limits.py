"""How long a request may take, and when it is better refused at once. Pure."""

import time

from pdserve.frontend.body import Refusal


def deadline(asked: str | None, default: float, most: float) -> float:
    """Monotonic seconds, from the header `x-request-timeout` (seconds, up to `most`) or the configured default. Raises
    Refusal."""
    if asked is None:
        return time.monotonic() + default
    try:
        seconds = float(asked)
    except ValueError:
        seconds = 0.0
    most = max(most, default)
    if not 0 < seconds <= most:  # also catches NaN
        message = f"x-request-timeout must be a number of seconds above 0 and up to {most:g}"
        raise Refusal(400, message, "x-request-timeout")
    return time.monotonic() + seconds


def too_late(wait: float, left: float, run: float, max_wait: float) -> float:
    """By how many seconds a turn in `wait` seconds comes too late for a request that has `left` seconds and
    takes `run`; 0 where it does not. Half of the time to spare may be waited away: all of these are guesses,
    and whoever starts too late costs as much as whoever is answered. Who is next is never refused."""
    if not wait:
        return 0.0
    return max(0.0, wait - max(0.0, min(max_wait, (left - run) / 2)))
