"""The state of the prompts in a prefill worker's engine."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from pdserve.contract.messages import PrefillRequest
from pdserve.contract.reports import MIN_HOP_SECONDS
from pdserve.observe.tracing import Tracer
from pdserve.queue.base import Delivery
from pdserve.util.lru import LruDict

_REMEMBERED = 1000
"""Number of cancelled prompts to remember: the engine may have finished some."""


@dataclass(eq=False)
class RunningPrefill:
    engine_id: str
    """New each time the engine gets the prompt, because it must never see an id twice. The request's own id may contain
    the commas and colons that separate ids in NIXL's notifications."""
    delivery: Delivery
    """The last delivery: a request may be delivered again while it runs."""
    queued: float
    """Seconds in the queue until the first delivery."""
    cached: int = 0
    """Prompt tokens in the engine's prefix cache when it got the prompt."""
    started: float = field(default_factory=time.monotonic)
    begun: float | None = None
    """Monotonic time at which the engine began to compute the prompt; None: unknown."""

    @property
    def request(self) -> PrefillRequest:
        return self.delivery.request

    @property
    def tokens(self) -> int:
        """Prompt tokens to compute."""
        return len(self.request.prompt) - self.cached

    @property
    def engine_queued(self) -> float:
        """Seconds in the engine's own queue; 0 if unknown."""
        return max(0.0, self.begun - self.started) if self.begun is not None else 0.0


class RunningPrefills:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._by_engine: dict[str, RunningPrefill] = {}
        self._by_request: dict[str, RunningPrefill] = {}
        self._cancelled: LruDict[PrefillRequest] = LruDict(_REMEMBERED)
        self._numbers = itertools.count()
        self.changed = asyncio.Event()
        """Set when a prompt has ended, the engine has done a step, or a prompt sent only to this worker waits."""

    def add(self, delivery: Delivery) -> RunningPrefill:
        running = RunningPrefill(f"prefill-{next(self._numbers)}", delivery, delivery.queued)
        self._by_engine[running.engine_id] = self._by_request[running.request.request_id] = running
        return running

    def drop(self, running: RunningPrefill, failed: bool = False) -> None:
        self.trace(running, "the prefill engine failed this request" if failed else "")
        del self._by_engine[running.engine_id]
        del self._by_request[running.request.request_id]
        self.changed.set()

    def trace(self, running: RunningPrefill, error: str) -> None:
        """Send the worker's spans of the request's trace."""
        request = running.request
        if not request.traceparent:
            return
        begins = running.started
        if running.engine_queued >= MIN_HOP_SECONDS:
            begins += running.engine_queued
            if waited := self._tracer.part("engine-queue", running.started, request.traceparent):
                waited.end(begins)
        if span := self._tracer.part("prefill", begins, request.traceparent):
            span.end(time.monotonic(), {"pdserve.prompt_tokens": len(request.prompt)}, error)

    def cancel(self, running: RunningPrefill) -> None:
        """Drop the prompt, but remember its request, because the engine may have finished it already."""
        self.drop(running)
        # without the fields that may take megabytes
        self._cancelled[running.engine_id] = msgspec.structs.replace(running.request, prompt=[], body=[])

    def pop_cancelled(self, engine_id: str) -> PrefillRequest | None:
        return self._cancelled.pop(engine_id, None)

    def of_engine(self, engine_id: str) -> RunningPrefill | None:
        return self._by_engine.get(engine_id)

    def of_request(self, request_id: str) -> RunningPrefill | None:
        return self._by_request.get(request_id)

    @property
    def tokens(self) -> int:
        return sum(running.tokens for running in self)

    def __iter__(self) -> Iterator[RunningPrefill]:
        return iter(list(self._by_engine.values()))

    def __len__(self) -> int:
        return len(self._by_engine)


async def until(condition: Callable[[], bool], changed: asyncio.Event, tick: float | None = None) -> None:
    """Wait until `condition` holds; check it after each change, and every `tick` seconds."""
    while not condition():
        changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(tick):
                await changed.wait()
