"""What a prefill worker tells decode workers, until the KV that it tells of is read or rejected.

Answers get lost, with NATS, with a link, with a decode worker that was away. The KV of an answer that no decode worker
takes up would stay until the end of its lease, and only the decode worker knows that it does not read it: told again,
it takes the KV or rejects it (docs/decisions/0007-lost-answers.md)."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from pdserve.errors import QueueUnavailable
from pdserve.messages import PrefillAnswer, PrefillConfirm, PrefillDone, PrefillFailed
from pdserve.process.presence import MAX_PAIRS
from pdserve.queue.base import PrefillQueue
from pdserve.records import Role
from pdserve.registry.view import RegistryView

log = logging.getLogger(__name__)

LOOK_INTERVAL = 0.5
"""seconds between two looks at what was not read"""
TELL_AGAIN = 2.0
"""seconds after which an answer whose KV was not read is said again; a read takes milliseconds"""
FORGET = 2.0
"""leases after which KV is taken for freed though the engine never said so"""


@dataclass
class _Kept:
    decode: str
    answer: PrefillDone
    warm_up: bool
    since: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)


class AnswerSender:
    """Knows the answers whose KV this worker still keeps, by the `request_id` of their handles."""

    def __init__(self, queue: PrefillQueue) -> None:
        self._queue = queue
        self._kept: dict[str, _Kept] = {}
        self._warm: set[str] = set()
        """decode workers that have read KV of this worker, or rejected it, or were told that there is none"""
        self._change = asyncio.Event()

    async def send(self, decode: str, answer: PrefillAnswer, *, warm_up: bool = False) -> None:
        if isinstance(answer, PrefillDone):
            self._kept[answer.handle.request_id] = _Kept(decode, answer, warm_up)
            answer = aged(answer)
        elif warm_up:
            self._warm.add(decode)
            self._change.set()
        await unless_away(self._queue.answer(decode, answer))

    async def confirm(self, confirm: PrefillConfirm) -> None:
        """Say again what a decode worker wants to be sure of."""
        kept = self._kept.get(confirm.held)
        answer: PrefillAnswer = PrefillFailed(confirm.request_id, "expired", "its KV is kept no longer")
        if kept is not None:
            answer = aged(kept.answer, confirm.token)
        await unless_away(self._queue.answer(confirm.decode, answer))

    async def repeat(self) -> None:
        """Say again what was not taken up, for ever."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            for decode, answer in self.untaken():
                log.info("request %s: its KV was not read yet, telling %s again", answer.request_id, decode)
                await unless_away(self._queue.answer(decode, aged(answer)))

    def untaken(self) -> Iterator[tuple[str, PrefillDone]]:
        """Decode worker and answer, where it is time to say it again; a caller says each that it is given."""
        now = time.monotonic()
        for request_id, kept in list(self._kept.items()):
            if now > kept.since + FORGET * kept.answer.handle.lease:
                self.released(request_id)
            elif now >= kept.told + TELL_AGAIN:
                kept.told = now
                yield kept.decode, kept.answer

    def released(self, request_id: str) -> None:
        """The engine keeps this KV no longer; unknown ids are ignored."""
        kept = self._kept.pop(request_id, None)
        if kept is not None and kept.warm_up:
            self._warm.add(kept.decode)
        self._change.set()

    async def empty(self) -> None:
        """Wait until no KV is kept."""
        await self._until(lambda: not self._kept)

    async def warm(self, decode_workers: Callable[[], set[str]]) -> None:
        """Wait until each of these has read the KV of a warm-up, or tried to in vain
        (docs/decisions/0008-warm-up.md). Where they are many, only some of them will: half as many as each of them
        chooses are enough."""

        def enough() -> bool:
            workers = decode_workers()
            return workers <= self._warm or (
                len(workers) > MAX_PAIRS and len(workers & self._warm) >= MAX_PAIRS / 2
            )

        await self._until(enough)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._change.clear()
            await self._change.wait()


def readers(view: RegistryView, model: str, fingerprint: str) -> set[str]:
    """Decode workers that may read KV of this fingerprint, ready or not yet."""
    announced = [worker for worker in view.instances(Role.DECODE, model) if not worker.draining]
    workers = announced + view.newcomers(Role.DECODE, model)
    return {worker.id for worker in workers if worker.fingerprint == fingerprint}


def aged(answer: PrefillDone, token: str = "") -> PrefillDone:
    """As it is sent now: its time of computation, which means something on this host only, as an age."""
    age = time.monotonic() - answer.handle.computed_at
    unknown = msgspec.structs.replace(answer.handle, computed_at=-math.inf)
    return msgspec.structs.replace(answer, handle=unknown, age=age, token=token)


async def unless_away(message: Awaitable[None]) -> None:
    """While the queue is away nothing needs to be said: what was not acked is delivered again, and an answer
    whose KV was not read is said again."""
    with suppress(QueueUnavailable):
        await message
