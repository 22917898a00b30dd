"""The prompts that a prefill worker has in its engine."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pdserve.queue.base import Delivery

_REMEMBERED = 1000


class Asker(NamedTuple):
    decode: str
    request_id: str


@dataclass(eq=False)
class Job:
    engine_id: str
    """Fresh for each delivery: an engine must never see one id twice, and a request may be delivered twice.
    Without the request's own id, which a client may have chosen: NIXL's notifications are text with commas
    and colons."""
    delivery: Delivery
    started: float = field(default_factory=time.monotonic)


class Jobs:
    def __init__(self) -> None:
        self._by_engine: dict[str, Job] = {}
        self._by_request: dict[str, Job] = {}
        self._cancelled: dict[str, Asker] = {}
        self._numbers = itertools.count()
        self._change = asyncio.Event()

    def add(self, delivery: Delivery) -> Job:
        request_id = delivery.request.request_id
        job = Job(f"prefill-{next(self._numbers)}", delivery)
        self._by_engine[job.engine_id] = self._by_request[request_id] = job
        return job

    def drop(self, job: Job) -> None:
        del self._by_engine[job.engine_id]
        del self._by_request[job.delivery.request.request_id]
        self.changed()

    def cancel(self, job: Job) -> None:
        """Drop it, but keep in mind for a while who had asked: its prompt may be done already."""
        self.drop(job)
        request = job.delivery.request
        self._cancelled[job.engine_id] = Asker(request.decode, request.request_id)
        if len(self._cancelled) > _REMEMBERED:
            del self._cancelled[next(iter(self._cancelled))]

    def asker_of_cancelled(self, engine_id: str) -> Asker | None:
        return self._cancelled.pop(engine_id, None)

    def of_engine(self, engine_id: str) -> Job | None:
        return self._by_engine.get(engine_id)

    def of_request(self, request_id: str) -> Job | None:
        return self._by_request.get(request_id)

    @property
    def tokens(self) -> int:
        return sum(len(job.delivery.request.prompt) for job in self)

    def changed(self) -> None:
        """Something happened on which a condition of `until` may depend."""
        self._change.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._change.clear()
            await self._change.wait()

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._by_engine.values()))

    def __len__(self) -> int:
        return len(self._by_engine)
