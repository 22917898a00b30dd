"""Limits the prompts that a decode worker's engine computes at a time.

In each step the engine computes a chunk of every prompt that it has, and running streams wait for all of these chunks.
So the engine gets only as many prompts as make one chunk together: a long prompt alone, or several short ones. The
others wait here (`order.py`), so that a request whose KV comes from a prefill worker is never behind them in the
engine."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.decode.order import FairOrder


class PromptTurns:
    def __init__(self, chunk: int) -> None:
        """`chunk`: tokens; 0: no limit."""
        self._chunk = chunk
        self._held = 0
        self._waiting: FairOrder[tuple[int, asyncio.Event]] = FairOrder()

    @asynccontextmanager
    async def turn(
        self, tokens: int, client: str = "", due: float = math.inf, needs: float = 0.0
    ) -> AsyncIterator[bool]:
        """Hold a turn for a prompt with so many tokens to compute, whose first token is promised for `due` and comes
        `needs` seconds after its turn. Yields whether it had to wait."""
        prompt = min(tokens, self._chunk), asyncio.Event()
        tokens, event = prompt
        self._waiting.add(client, prompt, due, needs)
        self._start_next()
        waits = not event.is_set()
        try:
            await event.wait()
            yield waits
        finally:
            if event.is_set():
                self._held -= tokens
            else:
                self._waiting.remove(client, prompt)
            self._start_next()

    def _start_next(self) -> None:
        now = time.monotonic()
        while prompt := self._waiting.first(now):
            tokens, event = prompt
            if self._held and self._held + tokens > self._chunk:
                return
            self._waiting.pop(now)
            self._held += tokens
            event.set()
