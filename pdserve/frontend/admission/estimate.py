"""How large requests are and how long they take, learnt from those that finished."""

from dataclasses import dataclass

_MEMORY = 32
"""requests; older ones count less and less"""


@dataclass
class RequestEstimate:
    """Means over a model's finished requests that forget."""

    output_tokens: float = 128.0
    """that a request generates; before the first one, a guess"""
    ttft: float = 0.0
    """seconds from sending it to a worker to its first token"""
    itl: float = 0.0
    """seconds between two tokens"""
    _learnt: int = 0

    def learn(self, output_tokens: int, ttft: float, decode_seconds: float) -> None:
        """Take one request that ran undisturbed into account; `decode_seconds` come after its first token."""
        self._learnt = min(self._learnt + 1, _MEMORY)
        self.output_tokens += (output_tokens - self.output_tokens) / self._learnt
        self.ttft += (ttft - self.ttft) / self._learnt
        self.itl += (decode_seconds / max(1, output_tokens - 1) - self.itl) / self._learnt

    def tokens(self, max_tokens: int | None) -> float:
        """Tokens that a request with this bound probably generates."""
        return self.output_tokens if max_tokens is None else min(max_tokens, self.output_tokens)

    def seconds(self, max_tokens: int | None) -> float:
        """How long a worker probably takes for it."""
        return self.ttft + self.itl * self.tokens(max_tokens)
