"""Limits the prompts that a decode worker's engine computes at a time.

In each step the engine computes a chunk of every prompt that it has, and running streams wait for all of these chunks.
So the engine gets only as many prompts as make one chunk together: a long prompt alone, or several short ones. The
others wait here (`fair_order.py`), so that a request whose KV comes from a prefill worker is never behind them in the
engine. A very short one does not wait for the chunks of another client's long one."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pdserve.contract.slo import is_flex
from pdserve.decode.scheduling.fair_order import FairOrder

SHORT = 8
"""a prompt of at most the usual chunk divided by this is short"""
PASSING = 4
"""short prompts that may be in the engine beside a chunk of others, one for each client that has no other there"""


@dataclass(frozen=True, eq=False)
class _Prompt:
    tokens: int
    client: str
    begins: asyncio.Event = field(default_factory=asyncio.Event)


class PromptTurns:
    def __init__(self, chunk: Callable[[], int], usual: int) -> None:
        """Tokens: of the chunk now, and of the one where nothing makes it shorter; 0: no limit."""
        self._chunk, self._short = chunk, usual // SHORT
        self._inside: set[_Prompt] = set()
        self._passing: set[_Prompt] = set()
        self._waiting: FairOrder[_Prompt] = FairOrder()

    @asynccontextmanager
    async def turn(
        self,
        tokens: int,
        client: str = "",
        due: float = math.inf,
        needs: float = 0.0,
        begins: asyncio.Event | None = None,
    ) -> AsyncIterator[bool]:
        """Hold a turn for a prompt with so many tokens to compute, whose first token is promised for `due` and comes
        `needs` seconds after its turn. Yields whether it had to wait."""
        prompt = _Prompt(tokens, client, begins or asyncio.Event())
        self._waiting.add(client, prompt, due, needs)
        self._start_next()
        if not prompt.begins.is_set() and self._may_pass(prompt):
            self._waiting.remove(client, prompt)
            self._passing.add(prompt)
            prompt.begins.set()
        waits = not prompt.begins.is_set()
        try:
            await prompt.begins.wait()
            yield waits
        finally:
            self._waiting.remove(client, prompt)
            self._inside.discard(prompt)
            self._passing.discard(prompt)
            self._start_next()

    def _may_pass(self, prompt: _Prompt) -> bool:
        here = {each.client for each in self._inside | self._passing}
        may = prompt.tokens <= self._short and not is_flex(prompt.client)
        return may and len(self._passing) < PASSING and prompt.client not in here

    def _start_next(self) -> None:
        now, chunk = time.monotonic(), self._chunk()
        while prompt := self._waiting.first(now):
            spare = is_flex(prompt.client)  # spare ones hold up no other
            inside = [each for each in self._inside if spare or not is_flex(each.client)]
            if inside and sum(min(each.tokens, chunk) for each in (*inside, prompt)) > chunk:
                return
            self._waiting.pop(now)
            self._inside.add(prompt)
            prompt.begins.set()
