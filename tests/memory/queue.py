"""The prefill queue in memory: the queues of a test share a MemoryBroker, whose outages the test simulates."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pdserve.contract.messages import (
    PrefillAnswer,
    PrefillCancel,
    PrefillLoad,
    PrefillPrefixes,
    PrefillRequest,
    QueueState,
    ToPrefill,
)
from pdserve.queue.base import Delivery, PrefillQueue
from pdserve.queue.depth import Puller
from pdserve.util.errors import QueueFull, QueueUnavailable
from pdserve.util.lru import LruDict


@dataclass(eq=False)
class _Entry:
    request: PrefillRequest
    stored: float
    deliveries: int = 0
    again_at: float = 0.0
    """monotonic time from which the request may be delivered again; 0 if it was not delivered yet"""


@dataclass
class _ModelQueue:
    entries: list[_Entry] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    cancelled: LruDict[None] = field(default_factory=lambda: LruDict(20_000))
    loads: dict[str, tuple[PrefillLoad, float]] = field(default_factory=dict)
    held: dict["MemoryQueue", int] = field(default_factory=dict)
    listeners: dict[str, list[asyncio.Queue[Any]]] = field(default_factory=lambda: defaultdict(list))

    def tell(self, subject: str, message: object) -> None:
        for listener in self.listeners[subject]:
            listener.put_nowait(message)


class MemoryBroker:
    """Simulates NATS."""

    def __init__(self, ack_wait: float = 15.0, max_deliver: int = 5, bound: int = 1000) -> None:
        self.ack_wait = ack_wait
        self.max_deliver = max_deliver
        self.bound = bound
        self.alive = True
        self.hung: set[str] = set()
        """prefill workers that do not answer `listens`"""
        self.losses = 0
        self.changed = asyncio.Condition()
        self._queues: dict[tuple[str, str], _ModelQueue] = defaultdict(_ModelQueue)

    def queue(self, namespace: str, model: str) -> _ModelQueue:
        return self._queues[namespace, model]

    def check(self) -> None:
        if not self.alive:
            raise QueueUnavailable("the broker is down")

    async def down(self) -> None:
        self.alive = False
        await self.tell()

    async def up(self, lose_data: bool = False) -> None:
        self.alive = True
        if lose_data:
            self.losses += 1
            for queue in self._queues.values():
                queue.entries.clear()
                queue.ids.clear()
        await self.tell()

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class MemoryDelivery(Delivery):
    def __init__(self, broker: MemoryBroker, requests: _ModelQueue, entry: _Entry) -> None:
        self._broker = broker
        self._requests = requests
        self._entry = entry
        super().__init__(entry.request, time.monotonic() - entry.stored, redelivered=entry.deliveries > 1)

    async def ack(self) -> None:
        if self._entry in self._requests.entries:
            self._requests.entries.remove(self._entry)

    async def in_progress(self) -> None:
        self._broker.check()
        self._entry.again_at = time.monotonic() + self._broker.ack_wait

    async def give_back(self) -> None:
        self._broker.check()
        self._entry.again_at = time.monotonic()
        await self._broker.tell()


class MemoryQueue(PrefillQueue):
    def __init__(self, broker: MemoryBroker, namespace: str = "pdserve", model: str = "model") -> None:
        self._broker = broker
        self._namespace, self._model = namespace, model
        self._requests = broker.queue(namespace, model)
        self._inboxes: dict[str, asyncio.Queue[Any]] = {}

    def bind(self, fingerprint: str) -> None:
        self._requests = self._broker.queue(self._namespace, f"{self._model}+{fingerprint}")

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for subject, inbox in self._inboxes.items():
                self._requests.listeners[subject].remove(inbox)
            self._inboxes.clear()
            self.hold(0)

    @property
    def connected(self) -> bool:
        return self._broker.alive

    @property
    def losses(self) -> int:
        return self._broker.losses

    @property
    def stored(self) -> int:
        now = time.monotonic()
        return sum(
            1
            for entry in self._requests.entries
            if not entry.deliveries and entry.stored + entry.request.timeout > now
        )

    @property
    def depth(self) -> int:
        return self.stored + sum(self._requests.held.values())

    @property
    def loads(self) -> Mapping[str, tuple[PrefillLoad, float]]:
        return self._requests.loads

    def hold(self, requests: int) -> None:
        self._requests.held.pop(self, None)
        if requests:
            self._requests.held[self] = requests

    async def publish(self, request: PrefillRequest) -> None:
        self._broker.check()
        if len(self._requests.entries) >= self._broker.bound:
            raise QueueFull("the prefill queue is full")
        if request.request_id not in self._requests.ids:
            self._requests.ids.add(request.request_id)
            self._requests.entries.append(_Entry(request, time.monotonic()))
        await self._broker.tell()

    def answers(self, instance: str) -> AsyncIterator[PrefillAnswer]:
        return self._messages(f"answers/{instance}")

    async def cancel(self, request_ids: list[str]) -> None:
        self._broker.check()
        self._requests.cancelled.update(dict.fromkeys(request_ids))
        self._requests.tell("notices", PrefillCancel(request_ids))

    def prefixes(self) -> AsyncIterator[PrefillPrefixes]:
        return self._messages("prefixes")

    async def report_prefixes(self, changed: PrefillPrefixes) -> None:
        self._broker.check()
        self._requests.tell("prefixes", changed)

    async def address(self, worker: str, request: PrefillRequest) -> None:
        self._broker.check()
        self._requests.tell(f"addressed/{worker}", request)

    async def listens(self, worker: str) -> bool:
        self._broker.check()
        if worker in self._broker.hung:
            raise TimeoutError
        return bool(self._requests.listeners.get(f"addressed/{worker}"))

    async def expect_addressed(self, instance: str) -> None:
        self._inbox(f"addressed/{instance}")

    def addressed(self, instance: str) -> AsyncIterator[PrefillRequest]:
        return self._messages(f"addressed/{instance}")

    async def pull(self, limit: int, wait: float, worker: Puller | None = None) -> list[Delivery]:
        ends = time.monotonic() + wait
        while True:
            self._broker.check()
            if found := await self._take(limit):
                if worker is not None:
                    load = worker.load_with(delivery.request for delivery in found)
                    self._requests.loads[worker.id] = load, time.monotonic()
                    for delivery in found:
                        delivery.state = QueueState(0, self.stored, worker.id, load)
                return found
            now = time.monotonic()
            if now >= ends:
                return []
            waiting = [entry.again_at for entry in self._requests.entries if entry.again_at > now]
            async with self._broker.changed:
                try:
                    async with asyncio.timeout(min([ends, *waiting]) - now):
                        await self._broker.changed.wait()
                except TimeoutError:
                    pass

    def load_changed(self, worker: Puller) -> None:
        self._requests.loads[worker.id] = worker.load(), time.monotonic()

    async def _take(self, limit: int) -> list[Delivery]:
        found: list[Delivery] = []
        for entry in list(self._requests.entries):
            if len(found) == limit:
                break
            if entry.again_at > time.monotonic():
                continue
            entry.deliveries += 1
            entry.again_at = time.monotonic() + self._broker.ack_wait
            delivery = MemoryDelivery(self._broker, self._requests, entry)
            if self._wanted(entry):
                found.append(delivery)
            else:
                await delivery.ack()
        return found

    def _wanted(self, entry: _Entry) -> bool:
        return (
            entry.deliveries <= self._broker.max_deliver
            and entry.stored + entry.request.timeout > time.monotonic()
            and entry.request.request_id not in self._requests.cancelled
        )

    async def answer(self, instance: str, answer: PrefillAnswer) -> None:
        self._broker.check()
        self._requests.tell(f"answers/{instance}", answer)

    def notices(self) -> AsyncIterator[ToPrefill]:
        return self._messages("notices")

    def _inbox(self, subject: str) -> asyncio.Queue[Any]:
        """A reader that starts again gets the same inbox, with the messages that came meanwhile."""
        if subject not in self._inboxes:
            inbox = self._inboxes[subject] = asyncio.Queue()
            self._requests.listeners[subject].append(inbox)
        return self._inboxes[subject]

    def _messages(self, subject: str) -> AsyncIterator[Any]:
        inbox = self._inbox(subject)

        async def read() -> AsyncIterator[Any]:
            while True:
                yield await inbox.get()

        return read()
