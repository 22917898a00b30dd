"""Works off batches: sends their lines as flex requests through the frontend's own app."""

import asyncio
import fcntl
import logging
import time
import uuid
from collections import Counter
from contextlib import suppress

import httpx
import msgspec
from starlette.types import Receive, Scope, Send

from pdserve.frontend.batches.store import OPEN, Record, Store, parse
from pdserve.frontend.edge.response import HttpError
from pdserve.frontend.keys.auth import OWNER
from pdserve.frontend.plugins import PluginContext
from pdserve.runtime.tasks import TaskOwner, isolate_errors

logger = logging.getLogger(__name__)

LOOK = 1.0
"""seconds between two looks at the open batches, and between two writes of results"""
STEP = 10.0
"""seconds that are taken off the time of all open batches at once, before they pass"""
AGAIN = 60.0
"""seconds until a batch goes on after an error; others of its key run meanwhile"""
AHEAD = 8
"""lines of a batch that wait for places, beside those that may run"""
PAUSE = 5.0
"""seconds, at most, in which a batch sends nothing after a line was refused"""
UNKNOWN_FOR = 600.0
"""seconds of nothing but 404 until such a line fails: the workers of its model may not have registered yet"""
TRIES = 3
"""of a line whose error may be the server's"""


class BatchWork:
    """All open batches. Those of one key run one after another, those of several keys side by side."""

    def __init__(self, context: PluginContext, store: Store) -> None:
        self._context, self._store = context, store
        self._running: dict[str, str | None] = {}
        """id of a batch -> its owner; None while it pauses after an error"""
        self._counted = 0.0
        """monotonic seconds until which the time of the batches was taken off"""

    async def work(self) -> None:
        """Work while this process has the lock. Never returns."""
        with await asyncio.to_thread(self._store.lock.open, "w") as file:
            async with TaskOwner() as tasks:
                while True:
                    with suppress(BlockingIOError):
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which it may have
                        with isolate_errors("batches"):
                            await self._look(tasks)
                    await asyncio.sleep(LOOK)

    async def _look(self, tasks: TaskOwner) -> None:
        if (now := time.monotonic()) >= self._counted:
            await asyncio.to_thread(self._store.count_down, STEP)
            self._counted = now + STEP
        for owner, batch_id, left in await asyncio.to_thread(self._store.open_batches):
            waits = batch_id in self._running or (left > 0 and owner in self._running.values())
            if not waits and not self._context.draining():
                self._running[batch_id] = owner
                tasks.start(self._run(owner, batch_id), "batch")

    async def _run(self, owner: str, batch_id: str) -> None:
        try:
            with isolate_errors("batches") as one:
                await BatchRun(self._context, self._store, owner, batch_id).run()
            if one.error is not None:
                self._running[batch_id] = None
                await asyncio.sleep(AGAIN)
        finally:
            del self._running[batch_id]


class BatchRun:
    """What is left of a batch. A refused line is sent again after all others, so that it keeps no place from them."""

    def __init__(self, context: PluginContext, store: Store, owner: str, batch_id: str) -> None:
        self._context, self._store, self._name = context, store, (owner, batch_id)
        self._batch: Record = {}
        self._left = 0.0
        """seconds"""
        self._taken: set[int] = set()
        """lines that run or have results"""
        self._results: list[tuple[str, int, bytes]] = []
        """that are not written yet"""
        self._running, self._most, self._resume, self._written = 0, 1 << 20, 0.0, 0.0
        self._unknown_since = float("inf")
        self._ended, self._tries = asyncio.Event(), Counter[int]()
        seconds = f"{context.config.max_request_timeout:g}"
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self._ask, client=("batches", 0)),
            base_url="http://batches",
            headers={"x-request-timeout": seconds, "content-type": "application/json"},
            timeout=None,
        )

    async def run(self) -> None:
        """Return when the batch is closed, or this process drains."""
        self._batch, self._taken = await asyncio.to_thread(self._store.begin, *self._name)
        if self._batch["status"] not in OPEN:
            return
        await self._write()
        total = self._batch["request_counts"]["total"]
        async with self._client, TaskOwner() as lines:  # which cancels those that run where the batch stops
            while not self._stops() and (self._running or len(self._taken) < total):
                if len(self._taken) < total:
                    await self._send(lines)
                await self._wait()
        complete, cancelled = len(self._taken) == total, self._batch["status"] == "cancelling"
        if self._left <= 0 and not complete and not cancelled:
            await asyncio.to_thread(self._expire)
        await self._write()
        if complete or self._left <= 0:
            status = "cancelled" if cancelled else "completed" if complete else "expired"
            await asyncio.to_thread(self._store.close, *self._name, status)

    def _stops(self) -> bool:
        return self._context.draining() or self._left <= 0

    async def _send(self, tasks: TaskOwner) -> None:
        """Send each line once that does not run and has no result."""
        parts, sent = self._store.lines(self._batch["input_file_id"]), False
        while part := await asyncio.to_thread(next, parts, None):
            for number, text in part:
                if number in self._taken:
                    continue
                while not self._stops() and not self._has_room():
                    await self._wait()
                if self._stops():
                    return
                self._taken.add(number)
                self._running, sent = self._running + 1, True
                tasks.start(self._answer(number, text), "batch line")
        if not sent:
            raise LookupError(f"{self._name}: lines are missing in its input")

    def _has_room(self) -> bool:
        models = self._context.models
        places = sum(
            live * models.find(name).slots_per_worker
            for name, live in models.usable_workers().items()
            if live
        )
        return self._running < min(self._most, AHEAD + places) and time.monotonic() >= self._resume

    async def _wait(self) -> None:
        """Wait until a line ends, for a while, and write results from time to time."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), LOOK)
        self._ended.clear()
        if time.monotonic() >= self._written + LOOK:
            await self._write()

    async def _write(self) -> None:
        """Write the results, again and again while the disk is full, and see whether the batch goes on."""
        count = len(self._results)
        while True:
            try:
                written = await asyncio.to_thread(self._store.append, *self._name, self._results[:count])
                break
            except HttpError as error:
                if error.status < 500 or self._context.draining():
                    raise
                logger.warning("%s: cannot write results: %s; trying again", self._name, error)
                await asyncio.sleep(PAUSE)
        self._batch, self._left = written
        del self._results[:count]
        self._written = time.monotonic()

    def _expire(self) -> None:
        error = {"code": "batch_expired", "message": "the completion window ended before this request"}
        for part in self._store.lines(self._batch["input_file_id"]):
            for number, text in part:
                if number not in self._taken:
                    line = parse(text, self._batch["endpoint"])
                    self._results.append(("failed", number, _result(line.custom_id, None, error)))

    async def _answer(self, number: int, text: bytes) -> None:
        done = custom_id = None
        try:
            with isolate_errors("batch line") as one:
                # as it was checked: in a thread, where JSON may nest deeper than below the tasks of the loop
                line = await asyncio.to_thread(parse, text, self._batch["endpoint"])
                custom_id, fields = line.custom_id, bytes(line.body)[1:-1].strip()
                fields += (
                    b"," * bool(fields) + b'"service_tier":"flex"'
                )  # of fields with one name, the last counts
                answer = await self._client.post(line.url, content=b"{" + fields + b"}")
                if self._is_final(answer, number):
                    self._most += 1
                    response = _response(answer)
                    done = (
                        "completed" if answer.is_success else "failed",
                        number,
                        _result(custom_id, response, None),
                    )
                else:
                    pause = min(PAUSE, float(answer.headers.get("retry-after", PAUSE)))
                    self._resume = time.monotonic() + pause
            if one.error is not None and self._has_failed(number):
                error = {"code": "internal_error", "message": f"{TRIES} times {type(one.error).__name__}"}
                done = ("failed", number, _result(custom_id, None, error))
        finally:
            self._running -= 1
            if done is None:
                self._taken.discard(number)
            else:
                self._results.append(done)
            self._ended.set()

    def _is_final(self, answer: httpx.Response, number: int) -> bool:
        """Whether a line is not to be sent again. A key, a model and places may come back."""
        status, now = answer.status_code, time.monotonic()
        if status == 404:
            self._unknown_since = min(self._unknown_since, now)
            return now >= self._unknown_since + UNKNOWN_FOR
        self._unknown_since = float("inf")
        if status == 429:  # the limits of the key, perhaps: fewer at a time
            self._most = max(1, self._running // 2)
        if answer.headers.get("x-should-retry") == "false":
            return True
        starved = (
            status == 504 and "x-pdserve-instance" not in answer.headers
        )  # no place within the longest deadline
        return not (starved or status in (401, 429, 503)) and (status < 500 or self._has_failed(number))

    def _has_failed(self, number: int) -> bool:
        self._tries[number] += 1
        return self._tries[number] >= TRIES

    async def _ask(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._context.app()({**scope, "extensions": {OWNER: self._name[0]}}, receive, send)
        line = asyncio.current_task()
        if line is not None and line.cancelling():  # the app answered 503, and it would ask again
            raise asyncio.CancelledError


def _response(answer: httpx.Response) -> Record:
    body: object = answer.text
    with suppress(ValueError, RecursionError):
        body = msgspec.Raw(msgspec.json.format(answer.content, indent=-1))
    request_id = answer.headers.get("x-request-id")
    return {"status_code": answer.status_code, "request_id": request_id, "body": body}


def _result(custom_id: str | None, response: Record | None, error: Record | None) -> bytes:
    made = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(made) + b"\n"
