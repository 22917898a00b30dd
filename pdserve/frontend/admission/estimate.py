"""What a model's requests usually are, learnt from those that finished: means that forget."""

from dataclasses import dataclass

_MEMORY = 32
"""requests; older ones count less and less"""


@dataclass
class Usual:
    tokens: float = 128.0
    """that a request generates; before the first one, a guess"""
    first: float = 0.0
    """seconds from a worker's getting it to its first token"""
    gap: float = 0.0
    """seconds between two tokens"""
    _learnt: int = 0

    def learn(self, tokens: int, first: float, rest: float) -> None:
        """One request, undisturbed: `rest` are the seconds after its first token."""
        self._learnt = min(self._learnt + 1, _MEMORY)
        self.tokens += (tokens - self.tokens) / self._learnt
        self.first += (first - self.first) / self._learnt
        self.gap += (rest / max(1, tokens - 1) - self.gap) / self._learnt

    def output(self, max_tokens: int | None) -> float:
        """Tokens that a request with this bound probably generates."""
        return self.tokens if max_tokens is None else min(max_tokens, self.tokens)

    def seconds(self, max_tokens: int | None) -> float:
        """How long a worker probably takes for it."""
        return self.first + self.gap * self.output(max_tokens)
