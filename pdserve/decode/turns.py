"""Limits the prompts that a decode worker's engine computes at a time.

In each step the engine computes a chunk of every prompt that it has, and running streams wait for all of these chunks.
So the engine gets only as many prompts as make one chunk together: a long prompt alone, or several short ones. The
others wait here, in turn round the clients, so that a request whose KV comes from a prefill worker is never behind them
in the engine, and no client's prompt behind all of another's."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PromptTurns:
    def __init__(self, chunk: int) -> None:
        """`chunk`: tokens; 0: no limit."""
        self._chunk = chunk
        self._held = 0
        self._queues: dict[str, deque[tuple[int, asyncio.Event]]] = {}
        """by client, the next one first; none is empty"""

    @asynccontextmanager
    async def turn(self, tokens: int, client: str = "") -> AsyncIterator[bool]:
        """Hold a turn for a prompt with so many tokens to compute; those of a client are first come, first served.
        Yields whether it had to wait."""
        tokens, event = min(tokens, self._chunk), asyncio.Event()
        self._queues.setdefault(client, deque()).append((tokens, event))
        self._start_next()
        waits = not event.is_set()
        try:
            await event.wait()
            yield waits
        finally:
            if event.is_set():
                self._held -= tokens
            else:
                self._queues[client].remove((tokens, event))
                if not self._queues[client]:
                    del self._queues[client]
            self._start_next()

    def _start_next(self) -> None:
        while self._queues:
            client, queue = next(iter(self._queues.items()))
            if self._held and self._held + queue[0][0] > self._chunk:
                return
            tokens, event = queue.popleft()
            self._held += tokens
            event.set()
            del self._queues[client]
            if queue:  # its next one comes after those of all others
                self._queues[client] = queue
