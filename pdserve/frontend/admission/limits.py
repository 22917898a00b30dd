"""How long a request may take, and when it is better refused at once. Pure."""

import time

from pdserve.frontend.body import MAX_BODY, Refusal


def max_body(max_model_len: int, *, passing: bool) -> int:
    """Bytes of a request for a model with such a context. Beyond them no text fits, however it is written (64 bytes a
    token: text in \\u escapes, lists of token ids, several prompts); what is `passing`, tokenized for an answer and
    nothing else, may be a few times as long as the context."""
    own = (256 << 10) + 32 * max_model_len if passing else (4 << 20) + 64 * max_model_len
    return min(MAX_BODY, own)


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
