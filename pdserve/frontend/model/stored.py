"""Stored responses (/v1/responses), as vLLM's app of this frontend reads and writes them.

vLLM keeps them in four dicts, for ever and for all clients. Here `ModelResponses` stands in for these dicts and for
their lock. A response that vLLM writes stays in the frontend only as long as the request that makes it, background work
included; when vLLM leaves its lock, changed responses go into the store (`queue/responses.py`), where every frontend
finds them. A response that vLLM reads was loaded from there before vLLM got the request, and belongs to the client's
own API key. `tests/frontend/model/test_vllm_api.py` checks what this expects of vLLM.
"""

import asyncio
import logging
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pdserve.errors import BadRequest, QueueUnavailable
from pdserve.frontend.edge.trace import RequestFailure, RequestTrace
from pdserve.observe.metrics import STORED_BYTES, STORED_RESPONSES
from pdserve.queue.responses import ResponseStore
from pdserve.records import StoredResponse
from pdserve.tasks import Lifetime, on_loop

if TYPE_CHECKING:
    from pdserve.frontend.model.vllm_responses import ResponseJson

logger = logging.getLogger(__name__)

UNFINISHED = ("queued", "in_progress")
LARGE = 64 << 10
"""bytes above which a response is compressed in a thread"""
END_WITHIN = 5.0
"""seconds for cancelled background work to end"""
STOPPED = "the frontend was stopped"


@dataclass(eq=False)
class RunningResponse:
    """A response that a request of this frontend is making, or that was loaded for a request."""

    owner: str
    id: str
    model: str
    response: Any = None
    """vLLM's object; None until vLLM has made it"""
    messages: Any = None
    events: tuple[deque[Any], asyncio.Event] | None = None
    """of a background stream; the asyncio event is set when there is another one"""
    task: asyncio.Task[Any] | None = None
    """the background work"""
    saved: str = ""
    """its status when it was last stored"""

    def fail(self, why: str) -> None:
        """Mark the response as failed, unless it is over."""
        if self.response is not None and self.response.status in UNFINISHED:
            self.response.status = "failed"
            self.response.error = {"code": "server_error", "message": why}


@dataclass
class RequestResponses:
    """The stored responses that one HTTP request names, reads and makes."""

    owner: str
    named_id: str = ""
    named: StoredResponse | None = None
    """the response that the request names, as loaded from the store"""
    loaded: RunningResponse | None = None
    """the same, once vLLM has asked for it; or the named response, if this frontend is making it"""
    made: list[RunningResponse] = field(default_factory=list)
    touched: list[RunningResponse] = field(default_factory=list)
    """those that vLLM read or wrote since it took its lock"""

    def making(self, response_id: str) -> RunningResponse | None:
        return next((running for running in self.made if running.id == response_id), None)


_current: ContextVar[RequestResponses] = ContextVar("pdserve_responses")


def begin(owner: str) -> None:
    """Begin a request of this client in this task and the tasks that it makes. Replaces the connection's last
    request."""
    _current.set(RequestResponses(owner))


class StoredResponses(Lifetime):
    """The responses of one frontend and all of its models."""

    def __init__(self, store: ResponseStore, frontend: str) -> None:
        self.store = store
        self.frontend = frontend
        """instance id"""
        self._running: dict[tuple[str, str], RunningResponse] = {}
        """by owner and id"""
        self._codecs: dict[str, ResponseJson] = {}
        """by model"""
        self._away = False
        """whether the store's outage was logged"""

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        self.loop = asyncio.get_running_loop()
        async with self.store:
            try:
                yield
            finally:  # a drain has cut these short
                for running in list(self._running.values()):
                    if running.task is not None:
                        running.fail(STOPPED)
                        await self._save(running, last=True)

    def running(self, owner: str, response_id: str) -> RunningResponse | None:
        return self._running.get((owner, response_id))

    # one request

    async def name(self, response_id: str) -> StoredResponse | RunningResponse | None:
        """Find the response that the request names, among those being made here or in the store, and keep it for this
        request. Raises QueueUnavailable."""
        request = _current.get()
        request.named_id, request.named = response_id, None
        request.loaded = self._running.get((request.owner, response_id))
        if request.loaded is not None:
            return request.loaded
        with suppress(KeyError):
            data = await self.store.get(request.owner, response_id)
            try:
                request.named = msgspec.msgpack.decode(zlib.decompress(data), type=StoredResponse)
            except (zlib.error, msgspec.DecodeError) as error:
                logger.error("the stored response %s cannot be read: %s", response_id, error)
        return request.named

    async def replace(self, record: StoredResponse) -> None:
        """Replace the response that `name` has loaded. Raises QueueUnavailable."""
        request = _current.get()
        request.named = record
        data = zlib.compress(msgspec.msgpack.encode(record), 1)
        await self.store.put(request.owner, request.named_id, data)

    @asynccontextmanager
    async def lasting(self, trace: RequestTrace, grace: float) -> AsyncIterator[None]:
        """Enter around a model's answer. Leaving waits for the request's background work, until `grace` seconds after
        its deadline, and forgets the responses that it made; not if a drain cancels the task (see `_lifetime`)."""
        request, task = _current.get(), asyncio.current_task()
        try:
            yield
        finally:
            if task is None or not task.cancelling():
                await self._finish(request, trace, grace)

    async def _finish(self, request: RequestResponses, trace: RequestTrace, grace: float) -> None:
        while request.made:
            running = request.made[-1]
            if running.task is not None:
                await self._finish_work(running, running.task, trace, grace)
                if running.events is not None or running.response.status != running.saved:
                    await self._save(running, last=True)
            if self._running.get((running.owner, running.id)) is running:
                del self._running[running.owner, running.id]
            request.made.pop()

    async def _finish_work(
        self, running: RunningResponse, work: asyncio.Task[Any], trace: RequestTrace, grace: float
    ) -> None:
        try:
            await asyncio.wait({work}, timeout=max(0.0, trace.deadline + grace - time.monotonic()))
        except asyncio.CancelledError:
            running.fail(STOPPED)
            work.cancel()
            raise
        if not work.done():
            trace.failure = trace.failure or RequestFailure(504, "the request's deadline passed")
            running.fail(trace.failure.message)
            work.cancel()
            await asyncio.wait({work}, timeout=END_WITHIN)
        error = None if work.cancelled() or not work.done() else work.exception()
        if error is not None and trace.failure is None:
            logger.error("%s: background work failed", running.id, exc_info=error)
        running.fail(trace.failure.message if trace.failure else "it could not be completed")

    # into the store

    async def save_changed(self, touched: Sequence[RunningResponse]) -> None:
        for running in dict.fromkeys(touched):
            if running.response is not None and running.response.status != running.saved:
                await self._save(running)

    async def _save(self, running: RunningResponse, *, last: bool = False) -> None:
        """Raises nothing: the client gets its answer whatever becomes of the store."""
        if running.response is None:
            return
        unfinished = not last and (running.events is not None or running.response.status in UNFINISHED)
        running.saved = running.response.status
        try:
            data = self._encode(running, self.frontend if unfinished else "")
            pack = partial(zlib.compress, data, 1)
            packed = await asyncio.to_thread(pack) if len(data) > LARGE else pack()
            await self.store.put(running.owner, running.id, packed)
        except QueueUnavailable as error:
            if not self._away:
                logger.warning("responses are not stored for now: %s", error)
            self._away = True
            STORED_RESPONSES.labels("unavailable").inc()
        except Exception:
            logger.exception("%s is not stored", running.id)
            STORED_RESPONSES.labels("error").inc()
        else:
            self._away = False
            STORED_RESPONSES.labels("stored").inc()
            STORED_BYTES.inc(len(packed))

    def _encode(self, running: RunningResponse, frontend: str) -> bytes:
        codec = self._codecs[running.model]
        events = [] if running.events is None or frontend else list(running.events[0])
        return msgspec.msgpack.encode(
            StoredResponse(
                running.model,
                codec.dump(running.response),
                b"" if running.messages is None else codec.dump_messages(running.messages),
                [(event.type, codec.dump_event(event)) for event in events],
                frontend,
            )
        )

    # for vLLM's app

    def of_model(self, model: str, codec: "ResponseJson") -> "ModelResponses":
        self._codecs[model] = codec
        return ModelResponses(self, model, codec)

    def keep(self, running: RunningResponse) -> None:
        """Keep a response that is being made until its request ends."""
        self._running[running.owner, running.id] = running


class ModelResponses:
    """Stands in for the dicts of one model's app, and for their lock. vLLM awaits nothing while it holds the lock, so
    this does not lock: leaving it stores the responses that were changed under it."""

    def __init__(self, stored: StoredResponses, model: str, codec: "ResponseJson") -> None:
        self._stored = stored
        self._model = model
        self._codec = codec
        self.responses = _Attribute(self, "response")
        self.messages = _Attribute(self, "messages")
        self.events = _Events(self, "events")
        self.tasks = _Tasks(self, "task")

    async def __aenter__(self) -> None:
        _current.get().touched = []

    async def __aexit__(self, *_: object) -> None:
        await on_loop(self._stored.loop, self._stored.save_changed(_current.get().touched))

    def find(self, response_id: str) -> RunningResponse | None:
        """A response of the client whose request this task belongs to."""
        request = _current.get()
        found = request.making(response_id) or self._stored.running(request.owner, response_id)
        if found is None and request.named_id == response_id:
            if request.loaded is None and request.named is not None:
                request.loaded = self._load(request.owner, response_id, request.named)
            found = request.loaded
        if found is not None:
            request.touched.append(found)
        return found

    def make(self, response_id: str) -> RunningResponse:
        """The response of this id that this request makes. Clients may choose ids: each request that makes a response
        of the same id has its own; others find the one made last."""
        request = _current.get()
        found = request.making(response_id)
        if found is None:
            found = RunningResponse(request.owner, response_id, self._model)
            self._stored.keep(found)
            request.made.append(found)
        request.touched.append(found)
        return found

    def _load(self, owner: str, response_id: str, record: StoredResponse) -> RunningResponse:
        response = self._codec.load(record.response)
        messages = self._codec.load_messages(record.messages) if record.messages else None
        past = deque(StoredEvent(*event) for event in record.events)
        events = (past, asyncio.Event()) if past else None
        return RunningResponse(
            owner, response_id, record.model, response, messages, events, saved=response.status
        )


class _Attribute:
    """One of vLLM's dicts: one attribute of the responses, by their ids."""

    def __init__(self, responses: ModelResponses, name: str) -> None:
        self._responses = responses
        self._name = name

    def get(self, response_id: str, default: Any = None) -> Any:
        found = self._responses.find(response_id)
        value = getattr(found, self._name) if found is not None else None
        return default if value is None else value

    def __contains__(self, response_id: str) -> bool:
        return self.get(response_id) is not None

    def __getitem__(self, response_id: str) -> Any:
        if (value := self.get(response_id)) is None:
            raise KeyError(response_id)
        return value

    def __setitem__(self, response_id: str, value: Any) -> None:
        setattr(self._responses.make(response_id), self._name, value)


class _Events(_Attribute):
    def __getitem__(self, response_id: str) -> tuple[deque[Any], "_MoreEvents"]:
        """The events for a reader, which with vLLM's own would wait for ever for the end of a failed response."""
        events, signal = super().__getitem__(response_id)
        running = self._responses.find(response_id)
        assert running is not None
        return events, _MoreEvents(signal, running)


class _MoreEvents:
    def __init__(self, signal: asyncio.Event, running: RunningResponse) -> None:
        self._signal = signal
        self._running = running

    def clear(self) -> None:
        self._signal.clear()

    async def wait(self) -> None:
        """Raises BadRequest if no further event will come."""
        task = self._running.task
        if task is None or task.done():
            raise BadRequest(f"the response is {self._running.response.status}: there are no further events")
        await self._signal.wait()


class _Tasks(_Attribute):
    def get(self, response_id: str, default: Any = None) -> "_Work | None":
        task = super().get(response_id)
        return None if task is None else _Work(task)

    def pop(self, response_id: str, default: Any = None) -> None:
        """Keep the task, which is over: `StoredResponses.lasting` still needs it."""


class _Work:
    """Background work for vLLM to cancel: awaiting the task itself, vLLM would log its end as an error."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.cancel = task.cancel

    def __await__(self) -> Any:
        return asyncio.wait({self._task}).__await__()


class StoredEvent(NamedTuple):
    """A stored event, as vLLM's app reads it."""

    type: str
    json: str

    def model_dump_json(self, **_: object) -> str:
        return self.json
