"""Sends a prefill worker's answers, and repeats those with KV until it is read, rejected or past its KV lease.

The KV of a lost answer would be kept until the KV lease ends. A decode worker that gets the answer again reads the KV
or rejects it (docs/decisions/0007-lost-answers.md)."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from pdserve.contract.messages import PrefillAnswer, PrefillDone
from pdserve.contract.records import Role
from pdserve.prefill.running import until
from pdserve.process.presence import MAX_PAIRS
from pdserve.queue.base import PrefillQueue
from pdserve.registry.view import RegistryView
from pdserve.runtime.tasks import isolate_errors
from pdserve.util.errors import QueueUnavailable
from pdserve.util.ticks import tick

logger = logging.getLogger(__name__)

POLL_INTERVAL = 0.5
"""Seconds between two checks for answers to repeat."""
REPEAT_AFTER = 2.0
"""Seconds after which an answer whose KV was not read is repeated; a read takes milliseconds."""
FORGET_AFTER = 2.0
"""KV counts as freed after this many times its KV lease, even if the engine did not report it."""


@dataclass
class _Kept:
    decode: str
    answer: PrefillDone
    warm_up: bool
    since: float = field(default_factory=time.monotonic)
    sent: float = field(default_factory=time.monotonic)


class AnswerSender:
    def __init__(self, queue: PrefillQueue) -> None:
        self._queue = queue
        self._kept: dict[str, _Kept] = {}
        """Answers whose KV is kept, by the `request_id` of their handles."""
        self._warmed_up: set[str] = set()
        """Decode workers whose warm-up with this worker is over: its KV is freed, or its prefill failed."""
        self._changed = asyncio.Event()

    async def send(self, decode: str, answer: PrefillAnswer, *, warm_up: bool = False) -> None:
        if isinstance(answer, PrefillDone):
            self._kept[answer.handle.request_id] = _Kept(decode, answer, warm_up)
        elif warm_up:
            self._warmed_up.add(decode)
            self._changed.set()
        await unless_away(self._queue.answer(decode, answer))

    async def repeat(self) -> None:
        """Repeat answers whose KV was not read, for ever."""
        while True:
            await tick(POLL_INTERVAL)
            for decode, answer in self.to_repeat():
                logger.info(
                    "request %s: its KV was not read yet; repeating the answer to %s",
                    answer.request_id,
                    decode,
                )
                with isolate_errors("repeated answers"):
                    await unless_away(self._queue.answer(decode, answer))

    def to_repeat(self) -> Iterator[tuple[str, PrefillDone]]:
        """Yield the answers to repeat now, each with its decode worker, and count them as repeated."""
        now = time.monotonic()
        for request_id, kept in list(self._kept.items()):
            if now > kept.since + FORGET_AFTER * kept.answer.handle.lease:
                self.released(request_id)
            elif now >= kept.sent + REPEAT_AFTER:
                kept.sent = now
                yield kept.decode, kept.answer

    def released(self, request_id: str) -> None:
        """Record that the engine no longer keeps this KV; unknown ids are ignored."""
        kept = self._kept.pop(request_id, None)
        if kept is not None and kept.warm_up:
            self._warmed_up.add(kept.decode)
        self._changed.set()

    async def empty(self) -> None:
        """Wait until no KV is kept."""
        await until(lambda: not self._kept, self._changed)

    async def warm(self, decode_workers: Callable[[], set[str]]) -> None:
        """Wait until each of `decode_workers` has ended its warm-up with this worker, successfully or not
        (docs/decisions/0008-warm-up.md). Of more than `MAX_PAIRS` workers only some warm up with this one; half of
        `MAX_PAIRS` are enough."""

        def enough() -> bool:
            workers = decode_workers()
            return workers <= self._warmed_up or (
                len(workers) > MAX_PAIRS and len(workers & self._warmed_up) >= MAX_PAIRS / 2
            )

        await until(enough, self._changed, POLL_INTERVAL)  # polls, because decode workers come and go


def readers(view: RegistryView, model: str, fingerprint: str) -> set[str]:
    """Ids of the decode workers that may read KV of this fingerprint, ready or not yet, but not draining."""
    announced = [worker for worker in view.instances(Role.DECODE, model) if not worker.draining]
    workers = announced + view.newcomers(Role.DECODE, model)
    return {worker.id for worker in workers if worker.fingerprint == fingerprint}


async def unless_away(message: Awaitable[None]) -> None:
    """Send a message, or drop it while NATS is disconnected: prompts are delivered again, and answers repeated."""
    with suppress(QueueUnavailable):
        await message
