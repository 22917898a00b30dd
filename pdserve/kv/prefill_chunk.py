"""How many tokens of each prompt the next step of vLLM's scheduler computes: it reads that from its configuration anew
in each step (docs/decisions/0067-the-chunk.md). Pure: requests and configuration come from outside."""

from collections.abc import Mapping
from typing import Any

MAX_SHORT_STEPS = 2
"""steps in a row that are spared: in one a KV read begins, in the next its request has its first turn"""


class PrefillChunk:
    def __init__(self, config: Any, block: int) -> None:
        """`config`: vLLM's SchedulerConfig."""
        self._config, self._block = config, block
        self._tokens = self._usual = int(config.long_prefill_token_threshold)
        """0: no limit. What is usual counts for each prompt, another limit for all together"""
        self._prompts: dict[str, Any] = {}
        """vLLM's requests, from their admission until their prompt is computed"""
        self._spared, self._spare = 0, False

    def limit(self, tokens: int) -> None:
        """From the next step on."""
        self._tokens = tokens
        self._set()

    def admitted(self, request: Any) -> None:
        self._prompts[request.request_id] = request

    def ended(self, name: str) -> None:
        self._prompts.pop(name, None)

    def spare(self) -> None:
        """The next step begins to read KV, or has a request whose KV has come: it is to be short."""
        self._spare = self._spared < MAX_SHORT_STEPS
        self._set()

    def scheduled(self, tokens: Mapping[str, int]) -> None:
        """A step was scheduled, with so many tokens of each request."""
        self._spared, self._spare = self._spared + 1 if self._spare else 0, False
        for name, request in list(self._prompts.items()):
            if request.num_tokens - request.num_computed_tokens - tokens.get(name, 0) <= self._block:
                del self._prompts[name]
        self._set()

    def _set(self) -> None:
        least = min(self._block, self._usual or self._block)
        sharing = 1 if self._tokens == self._usual else max(1, len(self._prompts))
        share = 0 if self._spare else self._tokens // sharing
        self._config.long_prefill_token_threshold = max(least, share) if self._tokens else 0
