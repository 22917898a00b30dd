"""Which decode workers have read KV of this prefill worker once, or tried to in vain: it is not announced before
(docs/decisions/0008-warm-up.md)."""

import asyncio
from collections.abc import Callable

from pdserve.messages import PrefillAnswer, PrefillDone


class WarmDecodeWorkers:
    def __init__(self) -> None:
        self._warm: set[str] = set()
        self._kept: dict[str, str] = {}
        """KV of warm-ups that is kept, by the handle's `request_id`, with the decode worker that is to read it"""
        self._change = asyncio.Event()

    def answered(self, decode: str, answer: PrefillAnswer) -> None:
        """The warm-up of a decode worker."""
        if isinstance(answer, PrefillDone):
            self._kept[answer.handle.request_id] = decode
        else:
            self._add(decode)

    def released(self, request_id: str) -> None:
        """KV was read or rejected, of a warm-up or of another request."""
        if decode := self._kept.pop(request_id, None):
            self._add(decode)

    def _add(self, decode: str) -> None:
        self._warm.add(decode)
        self._change.set()

    async def until(self, peers: Callable[[], set[str]]) -> None:
        """Wait until all of these are warm."""
        while not peers() <= self._warm:
            self._change.clear()
            await self._change.wait()
