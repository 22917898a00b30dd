"""Estimates of admission control: how large a request is, how long it takes, how fast waiting requests are admitted,
and when it is better to refuse a request at once. Pure."""

import math
from dataclasses import dataclass

_REQUESTS = 32
"""finished requests that an estimate goes by; older ones count less and less"""
_SECONDS = 30.0
"""that the admission rate goes by; what was longer ago counts less and less"""
_ENOUGH = 1.0
"""seconds of waiting that have to be seen"""


@dataclass(frozen=True)
class RequestSize:
    """How much work a request is, as far as its body tells without a tokenizer."""

    prompt_tokens: int
    """a guess: bytes / 4"""
    max_tokens: int | None
    """for each sequence; None where the body sets no bound"""
    sequences: int = 1
    n: int = 1
    """of these, for each prompt"""


@dataclass
class RequestEstimate:
    """What a model's requests usually are: means over those that finished, which forget."""

    output_tokens: float = 128.0
    """that a request generates; before the first one, a guess"""
    ttft: float = 0.0
    """seconds from sending it to a worker to its first token"""
    itl: float = 0.0
    """seconds between two tokens"""
    _learnt: int = 0

    def learn(self, output_tokens: int, ttft: float, decode_seconds: float) -> None:
        """Take a request into account that ran undisturbed; `decode_seconds` are those after its first token."""
        self._learnt = min(self._learnt + 1, _REQUESTS)
        self.output_tokens += (output_tokens - self.output_tokens) / self._learnt
        self.ttft += (ttft - self.ttft) / self._learnt
        self.itl += (decode_seconds / max(1, output_tokens - 1) - self.itl) / self._learnt

    def tokens(self, max_tokens: int | None) -> float:
        """That a request with this bound probably generates."""
        return self.output_tokens if max_tokens is None else min(max_tokens, self.output_tokens)

    def seconds(self, max_tokens: int | None) -> float:
        """That a worker probably takes for it."""
        return self.ttft + self.itl * self.tokens(max_tokens)


class AdmissionRate:
    """Tokens that are admitted per second, counting only the time in which requests wait: that none came says nothing
    about how fast the graph is. `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds = 0.0
        self._tokens = 0.0

    def set_waiting(self, waiting: bool, now: float) -> None:
        """Whether from now on any request waits."""
        self._go_on(now)
        self._since = now if waiting else None

    def admitted(self, tokens: float, now: float) -> None:
        """A request that waited was admitted."""
        self._go_on(now)
        self._tokens += tokens

    def seconds(self, tokens: float, now: float) -> float | None:
        """Until so many tokens will have been admitted; None while too little was seen."""
        self._go_on(now)
        if not tokens:
            return 0.0
        if self._seconds < _ENOUGH or not self._tokens:
            return None
        return tokens * self._seconds / self._tokens

    def _go_on(self, now: float) -> None:
        if self._since is None:
            return
        kept = math.exp((self._since - now) / _SECONDS)
        self._tokens *= kept
        self._seconds = self._seconds * kept + _SECONDS * (1 - kept)
        self._since = now


def seconds_too_late(wait: float, left: float, run: float, max_wait: float) -> float:
    """By how many seconds a turn in `wait` seconds comes too late for a request that has `left` seconds and takes
    `run`; 0 where it does not. Half of the time to spare may be waited away: all of these are guesses, and a request
    that starts too late costs as much as one that is answered. The request that is next is never refused."""
    if not wait:
        return 0.0
    return max(0.0, wait - max(0.0, min(max_wait, (left - run) / 2)))
