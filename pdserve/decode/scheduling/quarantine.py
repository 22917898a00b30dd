"""Quarantine: finds the request that kills engines.

Each request that was being computed when an engine died is a *suspect*. A suspect enters the next engine only while no
other request there is unproven; if that engine dies too, the suspect killed it. A request is proven by its next token.
Other requests enter together, but not while a suspect waits before them or is unproven in the engine.
"""

import asyncio
from collections import deque

from pdserve.decode.requests import DecodeRequest


class Quarantine:
    """Requests enter in order of arrival, so that neither suspects nor others starve."""

    def __init__(self) -> None:
        self._unproven: set[DecodeRequest] = set()
        """In the engine, or about to enter, without a token of this engine."""
        self._queue: deque[tuple[DecodeRequest, asyncio.Future[None]]] = deque()

    async def enter(self, request: DecodeRequest) -> None:
        """Wait until the request may enter the engine, or until `leave`."""
        if not self._queue and self._may_enter(request):
            self._unproven.add(request)
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((request, turn))
        await turn

    def leave(self, request: DecodeRequest) -> None:
        """Record that the request has a token of this engine, or is over. May be called at any time and repeatedly."""
        if request in self._unproven:
            self._unproven.remove(request)
            self._advance()
        elif self._queue:
            for entry in [entry for entry in self._queue if entry[0] is request]:
                self._queue.remove(entry)
                _admit(entry[1])
            self._advance()

    def _advance(self) -> None:
        while self._queue and self._may_enter(self._queue[0][0]):
            request, turn = self._queue.popleft()
            self._unproven.add(request)
            _admit(turn)

    def _may_enter(self, request: DecodeRequest) -> bool:
        if request.engines_died:
            return not self._unproven
        return not any(other.engines_died for other in self._unproven)


def _admit(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # a worker that ends cancels the tasks of its requests
        turn.set_result(None)
