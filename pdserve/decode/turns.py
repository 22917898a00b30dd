"""Which prompts a decode worker has in its engine at a time.

The engine computes a chunk of each of them in a step, and running streams wait for all of these chunks. So there are as
many as make one chunk together: a long prompt alone, or several short ones. The others wait here, in order: a request
whose KV comes from a prefill worker is then never behind them in the engine."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PromptTurns:
    def __init__(self, chunk: int) -> None:
        """`chunk`: tokens; 0: there is no limit."""
        self._chunk = chunk
        self._held = 0
        self._line: deque[tuple[int, asyncio.Event]] = deque()

    @asynccontextmanager
    async def turn(self, tokens: int) -> AsyncIterator[bool]:
        """For a prompt with so many tokens to compute; first come, first served. Whether it had to wait."""
        tokens, event = min(tokens, self._chunk), asyncio.Event()
        self._line.append((tokens, event))
        self._call()
        waits = not event.is_set()
        try:
            await event.wait()
            yield waits
        finally:
            if event.is_set():
                self._held -= tokens
            else:
                self._line.remove((tokens, event))
            self._call()

    def _call(self) -> None:
        while self._line and (not self._held or self._held + self._line[0][0] <= self._chunk):
            tokens, event = self._line.popleft()
            self._held += tokens
            event.set()
