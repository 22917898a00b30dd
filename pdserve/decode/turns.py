"""Limits the prompts that a decode worker's engine computes at a time.

In each step the engine computes a chunk of every prompt that it has, and running streams wait for all of these chunks.
So the engine gets only as many prompts as make one chunk together: a long prompt alone, or several short ones. The
others wait here, in order, so that a request whose KV comes from a prefill worker is never behind them in the
engine."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PromptTurns:
    def __init__(self, chunk: int) -> None:
        """`chunk`: tokens; 0: no limit."""
        self._chunk = chunk
        self._held = 0
        self._queue: deque[tuple[int, asyncio.Event]] = deque()

    @asynccontextmanager
    async def turn(self, tokens: int) -> AsyncIterator[bool]:
        """Hold a turn for a prompt with so many tokens to compute; first come, first served. Yields whether it had to
        wait."""
        tokens, event = min(tokens, self._chunk), asyncio.Event()
        self._queue.append((tokens, event))
        self._start_next()
        waits = not event.is_set()
        try:
            await event.wait()
            yield waits
        finally:
            if event.is_set():
                self._held -= tokens
            else:
                self._queue.remove((tokens, event))
            self._start_next()

    def _start_next(self) -> None:
        while self._queue and (not self._held or self._held + self._queue[0][0] <= self._chunk):
            tokens, event = self._queue.popleft()
            self._held += tokens
            event.set()
