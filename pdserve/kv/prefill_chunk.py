"""Sets how many tokens of each prompt the next step computes: vLLM's scheduler reads `long_prefill_token_threshold`
before each step (docs/decisions/0067-the-chunk.md). Imports no vLLM: callers pass requests and configuration."""

from collections.abc import Mapping
from typing import Any

MAX_SHORT_STEPS = 2
"""Maximum of short steps in a row. A short step computes the fewest tokens of each prompt, because a KV read begins or
has ended."""


class PrefillChunk:
    def __init__(self, config: Any, block: int) -> None:
        """`config`: vLLM's SchedulerConfig; `block`: tokens in a KV block."""
        self._config, self._block = config, block
        self._tokens = self._default = int(config.long_prefill_token_threshold)
        """0: no limit. The default applies to each prompt, any other limit to all prompts of a step together."""
        self._prompts: dict[str, Any] = {}
        """vLLM's requests, from their allocation until at most a block of the prompt is left to compute."""
        self._short_steps, self._is_short = 0, False

    def set_limit(self, tokens: int) -> None:
        self._tokens = tokens
        self._apply()

    def add(self, request: Any) -> None:
        self._prompts[request.request_id] = request

    def remove(self, name: str) -> None:
        self._prompts.pop(name, None)

    def shorten_next_step(self) -> None:
        """Call it when the next step begins to read KV, or has a request whose KV has arrived."""
        self._is_short = self._short_steps < MAX_SHORT_STEPS
        self._apply()

    def on_step(self, tokens: Mapping[str, int]) -> None:
        """Record that a step was scheduled. `tokens`: of each request, by its id."""
        self._short_steps = self._short_steps + 1 if self._is_short else 0
        self._is_short = False
        for name, request in list(self._prompts.items()):
            if request.num_tokens - request.num_computed_tokens - tokens.get(name, 0) <= self._block:
                del self._prompts[name]
        self._apply()

    def _apply(self) -> None:
        least = min(self._block, self._default or self._block)
        sharing = 1 if self._tokens == self._default else max(1, len(self._prompts))
        share = 0 if self._is_short else self._tokens // sharing
        self._config.long_prefill_token_threshold = max(least, share) if self._tokens else 0
