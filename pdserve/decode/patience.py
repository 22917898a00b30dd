"""How long a decode worker waits for a remote prefill before it does the work itself."""

FLOOR = 2.0
"""seconds that any remote prefill may take: messages, scheduling, a busy machine"""
SLACK = 4.0
"""how many times longer than expected is too long"""
FIRST_GUESS = 500.0
"""tokens per second, until one prefill was seen; low, so that a slow machine's first request is not done
twice"""
_WEIGHT = 0.2


class Patience:
    """Learns the prefill workers' speed from their answers. The bound grows with the prompt and with what
    is queued before it, since a fixed one is too short for a long prompt and too long for a short one."""

    def __init__(self) -> None:
        self._rate = FIRST_GUESS
        self._tokens = 0.0
        """of an average request"""

    def observe(self, tokens: int, seconds: float) -> None:
        """A prefill of `tokens` took `seconds` in the prefill engine, batching with others included."""
        if seconds <= 0:
            return
        rate = tokens / seconds
        if not self._tokens:
            self._rate, self._tokens = rate, float(tokens)
        self._rate += _WEIGHT * (rate - self._rate)
        self._tokens += _WEIGHT * (tokens - self._tokens)

    def bound(self, tokens: int, queue_depth: int, workers: int) -> float:
        """Seconds from the enqueueing to the answer."""
        ahead = queue_depth * (self._tokens or tokens) / max(workers, 1)
        return FLOOR + SLACK * (tokens + ahead) / self._rate
