"""Runs the open batches: sends their lines as flex requests through the frontend's own app."""

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

from pdserve.frontend.batches.store import OPEN, Line, Record, Store, parse
from pdserve.frontend.edge.response import HttpError
from pdserve.frontend.keys.auth import OWNER
from pdserve.frontend.plugins import PluginContext
from pdserve.observe.metrics import BATCH_LINES, BATCHES, BATCHES_FREE
from pdserve.runtime.tasks import TaskOwner, isolate_errors

logger = logging.getLogger(__name__)

POLL_INTERVAL = 1.0
"""Seconds between two polls of the open batches, and between two writes of results."""
WINDOW_STEP = 10.0
"""Seconds between two countdowns of the open batches' completion windows."""
RERUN_DELAY = 60.0
"""Seconds until a batch runs again after an unexpected error."""
QUEUED_LINES = 8
"""Lines of a batch that wait in admission control, besides those that have slots."""
MAX_PAUSE = 5.0
"""Seconds of a batch's pause after a failed write. Maximum of its pause after a refused line."""
UNKNOWN_MODEL_SECONDS = 600.0
"""Seconds of nothing but 404s after which a 404 is a line's result. Until then, the model's workers may register."""
MAX_TRIES = 3
"""Tries of a line whose error may be the server's."""


class BatchRunner:
    """Runs the batches of an API key one after another, and those of different keys at the same time."""

    def __init__(self, context: PluginContext, store: Store) -> None:
        self._context = context
        self._store = store
        self._runs: dict[str, BatchRun] = {}
        """By batch id; includes batches that wait for a new run after an error."""
        self._next_step = 0.0
        """Monotonic time of the next `WINDOW_STEP`."""

    async def run(self) -> None:
        """Run batches while this process holds the lock, which only one frontend can hold. Never returns."""
        with await asyncio.to_thread(self._store.lock.open, "w") as file:
            async with TaskOwner() as tasks:
                while True:
                    with suppress(BlockingIOError):
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        with isolate_errors("batches"):
                            await self._poll(tasks)
                    await asyncio.sleep(POLL_INTERVAL)

    async def _poll(self, tasks: TaskOwner) -> None:
        if (now := time.monotonic()) >= self._next_step:
            await asyncio.to_thread(self._store.count_down, WINDOW_STEP)
            self._next_step = now + WINDOW_STEP
        free = await asyncio.to_thread(self._store.free_bytes)
        BATCHES_FREE.labels(self._store.folder).set(free)
        found = await asyncio.to_thread(self._store.open_batches)
        BATCHES.labels(self._store.folder).set(len(found))
        for owner, batch_id, left in found:
            must_wait = left > 0 and any(run.owner == owner and run.blocks for run in self._runs.values())
            if batch_id not in self._runs and not must_wait and not self._context.draining():
                self._runs[batch_id] = run = BatchRun(self._context, self._store, owner, batch_id)
                tasks.start(self._run(run), "batch")

    async def _run(self, run: "BatchRun") -> None:
        try:
            with isolate_errors("batches") as outcome:
                await run.run()
            if outcome.error is not None:
                run.blocks = False
                await asyncio.sleep(RERUN_DELAY)
        finally:
            del self._runs[run.batch_id]


class BatchRun:
    """Sends those lines of one batch that have no result. A refused line is sent again once all others were sent."""

    def __init__(self, context: PluginContext, store: Store, owner: str, batch_id: str) -> None:
        self.owner = owner
        self.batch_id = batch_id
        self.blocks = True
        """Whether the next batch of its API key waits for this one."""
        self._context = context
        self._store = store
        self._batch: Record = {}
        self._left = 0.0
        """Seconds left of its window."""
        self._taken: set[int] = set()
        """Lines that are running or have results."""
        self._results: list[tuple[str, int, bytes]] = []
        """Not written yet."""
        self._running = 0
        self._max_running = 1 << 20
        self._resume = 0.0
        """Monotonic end of the pause after a refusal."""
        self._written = 0.0
        """Monotonic time of the last write."""
        self._unknown_since = float("inf")
        """Monotonic time of the first 404 after the last response with another status."""
        self._line_ended = asyncio.Event()
        self._tries = Counter[int]()
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self._call_app, client=("batches", 0)),
            base_url="http://batches",
            headers={
                "x-request-timeout": f"{context.config.max_request_timeout:g}",
                "content-type": "application/json",
            },
            timeout=None,
        )

    async def run(self) -> None:
        """Return when the batch is closed, or this process drains."""
        self._batch, self._taken = await asyncio.to_thread(self._store.begin, self.owner, self.batch_id)
        if self._batch["status"] not in OPEN:
            return
        await self._write()
        total = self._batch["request_counts"]["total"]
        # at the end of this block, `lines` cancels those that still run
        async with self._client, TaskOwner() as lines:
            while not self._must_stop() and (self._running or len(self._taken) < total):
                if len(self._taken) < total:
                    await self._send_lines(lines)
                await self._wait()
        complete, cancelled = len(self._taken) == total, self._batch["status"] == "cancelling"
        if self._left <= 0 and not complete and not cancelled:
            await asyncio.to_thread(self._expire)
        await self._write()
        if complete or self._left <= 0:
            status = "cancelled" if cancelled else "completed" if complete else "expired"
            await asyncio.to_thread(self._store.close, self.owner, self.batch_id, status)

    def _must_stop(self) -> bool:
        return self._context.draining() or self._left <= 0

    async def _send_lines(self, tasks: TaskOwner) -> None:
        """Send, once, each line that is not running and has no result."""
        parts, sent = self._store.lines(self._batch["input_file_id"]), False
        while part := await asyncio.to_thread(next, parts, None):
            for number, text in part:
                if number in self._taken:
                    continue
                while not self._must_stop() and not self._has_room():
                    await self._wait()
                if self._must_stop():
                    return
                self._taken.add(number)
                self._running += 1
                sent = True
                tasks.start(self._run_line(number, text), "batch line")
        if not sent:
            raise LookupError(f"{self.batch_id}: lines are missing in its input")

    def _has_room(self) -> bool:
        models = self._context.models
        slots = sum(
            count * models.find(name).slots_per_worker
            for name, count in models.usable_workers().items()
            if count
        )
        return (
            self._running < min(self._max_running, QUEUED_LINES + slots) and time.monotonic() >= self._resume
        )

    async def _wait(self) -> None:
        """Wait until a line ends, at most `POLL_INTERVAL`. Write the results if the last write is that long ago."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._line_ended.wait(), POLL_INTERVAL)
        self._line_ended.clear()
        if time.monotonic() >= self._written + POLL_INTERVAL:
            await self._write()

    async def _write(self) -> None:
        """Write the results and read the batch again. Retry while the database cannot be written; meanwhile no
        line is sent."""
        count = len(self._results)
        while True:
            try:
                self._batch, self._left = await asyncio.to_thread(
                    self._store.append, self.owner, self.batch_id, self._results[:count]
                )
                break
            except HttpError as error:
                if error.status < 500 or self._context.draining():
                    raise
                logger.warning("%s: cannot write results: %s; trying again", self.batch_id, error)
                await asyncio.sleep(MAX_PAUSE)
        del self._results[:count]
        self._written = time.monotonic()

    def _expire(self) -> None:
        error = {"code": "batch_expired", "message": "the completion window ended before this request"}
        for part in self._store.lines(self._batch["input_file_id"]):
            for number, text in part:
                if number not in self._taken:
                    line = parse(text, self._batch["endpoint"])
                    self._results.append(("failed", number, _result(line.custom_id, None, error)))

    async def _run_line(self, number: int, text: bytes) -> None:
        result = custom_id = None
        try:
            with isolate_errors("batch line") as outcome:
                # in a thread, as in `begin`: in the event loop, Python's recursion limit may be reached earlier
                line = await asyncio.to_thread(parse, text, self._batch["endpoint"])
                custom_id = line.custom_id
                response = await self._client.post(line.url, content=_flex_body(line))
                if self._is_final(response, number):
                    self._max_running += 1
                    count = "completed" if response.is_success else "failed"
                    result = count, number, _result(custom_id, response, None)
                else:
                    pause = min(MAX_PAUSE, float(response.headers.get("retry-after", MAX_PAUSE)))
                    self._resume = time.monotonic() + pause
            if outcome.error is not None and self._has_failed(number):
                message = f"failed {MAX_TRIES} times: {type(outcome.error).__name__}"
                error = {"code": "internal_error", "message": message}
                result = "failed", number, _result(custom_id, None, error)
        finally:
            self._running -= 1
            if result is None:
                self._taken.discard(number)
            else:
                BATCH_LINES.labels(result[0]).inc()
                self._results.append(result)
            self._line_ended.set()

    def _is_final(self, response: httpx.Response, number: int) -> bool:
        """Whether the response is the line's result. If not, the line is sent again: keys, models and slots may come
        back."""
        status, now = response.status_code, time.monotonic()
        if status == 404:
            self.blocks = False
            self._unknown_since = min(self._unknown_since, now)
            return now >= self._unknown_since + UNKNOWN_MODEL_SECONDS
        self._unknown_since = float("inf")
        if status == 429:  # perhaps the key's limits: send fewer lines at a time
            self._max_running = max(1, self._running // 2)
        if response.headers.get("x-should-retry") == "false":
            return True
        got_no_slot = status == 504 and "x-pdserve-instance" not in response.headers
        if got_no_slot or status in (401, 429, 503):
            return False
        return status < 500 or self._has_failed(number)

    def _has_failed(self, number: int) -> bool:
        self._tries[number] += 1
        return self._tries[number] >= MAX_TRIES

    async def _call_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._context.app()({**scope, "extensions": {OWNER: self.owner}}, receive, send)
        line = asyncio.current_task()
        if line is not None and line.cancelling():  # else httpx returns the app's 503, and the line continues
            raise asyncio.CancelledError


def _flex_body(line: Line) -> bytes:
    """The line's body with `service_tier: flex` at its end: if a field is given twice, the last one counts."""
    fields = bytes(line.body)[1:-1].strip()
    return b"{" + fields + b"," * bool(fields) + b'"service_tier":"flex"}'


def _result(custom_id: str | None, response: httpx.Response | None, error: Record | None) -> bytes:
    """One line of an output or error file."""
    result = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": None, "error": error}
    if response is not None:
        body: object = response.text
        with suppress(ValueError, RecursionError):
            body = msgspec.Raw(msgspec.json.format(response.content, indent=-1))
        request_id = response.headers.get("x-request-id")
        result["response"] = {"status_code": response.status_code, "request_id": request_id, "body": body}
    return msgspec.json.encode(result) + b"\n"
