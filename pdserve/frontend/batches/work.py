"""Works off batches: sends their lines as spare requests through the frontend's own app."""

import asyncio
import time
import uuid
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import httpx
from starlette.types import Receive, Scope, Send

from pdserve.frontend.batches.store import Batch, Line, Store, lock, now, stores
from pdserve.frontend.keys.auth import OWNER
from pdserve.frontend.ribs import RibContext
from pdserve.tasks import Apart, Owner

LOOK = 1.0
"""seconds between two looks at the folder"""
AHEAD = 8
"""lines of a batch that wait for places, beside those that may run"""
PAUSE = 5.0
"""seconds, at most, before a line that was refused is sent again"""
UNKNOWN_FOR = 60.0
"""seconds until a line fails whose model is unknown: its workers may not have registered yet"""
TRIES = 3
"""times that a line may take longer than any request may"""


class BatchWork:
    """All batches of the folder. Those of one key one after another, of several keys beside each other."""

    def __init__(self, context: RibContext) -> None:
        self._context = context
        self._owners: set[str] = set()
        """of which a batch is being worked on"""
        self._over: defaultdict[str, set[str]] = defaultdict(set)
        """ids of each owner's batches that are over: their records, which do not change, are not read again"""

    async def work(self) -> None:
        """Work while this process has the lock. Never returns."""
        folder = self._context.config.batches
        assert folder is not None
        with await asyncio.to_thread((folder / "lock").open, "w") as file:
            async with Owner() as tasks:
                locked = False
                while True:
                    locked = locked or lock(file)
                    if locked and not self._context.draining():
                        await self._look(folder, tasks)
                    await asyncio.sleep(LOOK)

    async def _look(self, folder: Path, tasks: Owner) -> None:
        for store in await asyncio.to_thread(stores, folder):
            with Apart("batches"):
                if store.owner in self._owners:
                    continue
                over = self._over[store.owner]
                batches = await asyncio.to_thread(store.all, Batch, over)
                over |= {batch.id for batch in batches if not batch.open}
                if waiting := [batch for batch in batches if batch.open]:
                    self._owners.add(store.owner)
                    tasks.start(self._run(store, waiting[-1]), "batch")

    async def _run(self, store: Store, batch: Batch) -> None:
        try:
            with Apart("batches") as one:
                await BatchRun(self._context, store, batch).run()
            if one.error is not None:  # a full disk, perhaps
                await asyncio.sleep(10 * LOOK)
        finally:
            self._owners.remove(store.owner)


class BatchRun:
    def __init__(self, context: RibContext, store: Store, batch: Batch) -> None:
        self._context, self._store, self._batch = context, store, batch
        self._running, self._most = 0, 1 << 20
        self._ended = asyncio.Event()
        self._results: dict[str, list[dict[str, object]]] = {"output": [], "errors": []}
        """that are not written yet"""
        self._done: set[str] = set()
        self._saved = 0.0
        self._unknown: dict[object, float] = {}
        """model -> since when, in monotonic seconds"""

    async def run(self) -> None:
        """Do what is left of the batch, unless this process drains before its end."""
        store, batch = self._store, self._batch
        if errors := await asyncio.to_thread(store.check, batch):
            batch.errors = {"object": "list", "data": errors}
            batch.become("failed")
            await asyncio.to_thread(store.save, batch)
            return
        for kind, count in (("output", "completed"), ("errors", "failed")):
            done = await asyncio.to_thread(store.done, batch, kind)
            batch.request_counts[count] = len(done)
            self._done |= done
        if batch.status == "validating":
            batch.become("in_progress")
            await asyncio.to_thread(store.save, batch)
        headers = {"x-request-timeout": f"{self._context.config.max_request_timeout:g}"}
        transport = httpx.ASGITransport(self._ask, client=("batches", 0))
        async with (
            httpx.AsyncClient(
                transport=transport, base_url="http://batches", headers=headers, timeout=None
            ) as client,
            Owner() as lines,  # it cancels those that run where the batch stops
        ):
            left = store.lines(batch, frozenset(self._done))
            while line := await asyncio.to_thread(next, left, None):
                while self._running >= self._room() and not self._stops():
                    await self._write()
                if self._stops():
                    break
                self._running += 1
                lines.start(self._answer(client, line), "batch line")
            while self._running and not self._stops():
                await self._write()
        await self._write()
        await self._end()

    def _stops(self) -> bool:
        store, batch = self._store, self._batch
        return self._context.draining() or store.cancelling(batch).exists() or now() >= batch.expires_at

    def _room(self) -> int:
        models = self._context.models
        places = sum(live * models.find(name).places for name, live in models.live().items() if live)
        return min(self._most, AHEAD + places)

    async def _write(self) -> None:
        """Wait until a line ends, for a while, and write what there is."""
        if self._running:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), LOOK)
        self._ended.clear()
        for kind, count in (("output", "completed"), ("errors", "failed")):
            results, self._results[kind] = self._results[kind], []
            await asyncio.to_thread(self._store.append, self._batch, kind, results)
            self._batch.request_counts[count] += len(results)
            self._done |= {str(result["custom_id"]) for result in results}
        if time.monotonic() > self._saved + LOOK:
            self._saved = time.monotonic()
            await asyncio.to_thread(self._store.save, self._batch)

    async def _end(self) -> None:
        store, batch = self._store, self._batch
        counts, cancelled = batch.request_counts, store.cancelling(batch).exists()
        left = counts["total"] - len(self._done)
        if left and not cancelled and now() < batch.expires_at:
            return  # it drains; or a line failed as none should
        if left and not cancelled:
            error = {"code": "batch_expired", "message": "the completion window ended before this request"}
            rest = store.lines(batch, self._done)
            failed = await asyncio.to_thread(lambda: [_result(line, None, error) for line in rest])
            await asyncio.to_thread(store.append, batch, "errors", failed)
            counts["failed"] += left
        batch.output_file_id = await asyncio.to_thread(store.finish, batch, "output")
        batch.error_file_id = await asyncio.to_thread(store.finish, batch, "errors")
        batch.become("cancelled" if cancelled else "expired" if left else "completed")
        await asyncio.to_thread(store.save, batch)

    async def _answer(self, client: httpx.AsyncClient, line: Line) -> None:
        try:
            body, tries = line.body | {"service_tier": "flex"}, 1
            while self._again(line, answer := await client.post(line.url, json=body), tries):
                await asyncio.sleep(min(PAUSE, float(answer.headers.get("retry-after", PAUSE))))
                tries += 1
                if answer.status_code == 429:  # the limits of the key, perhaps: fewer at a time
                    self._most = max(1, self._running // 2)
            self._most += 1
            response = {
                "status_code": answer.status_code,
                "request_id": answer.headers["x-request-id"],
                "body": answer.json(),
            }
            self._results["output" if answer.is_success else "errors"].append(_result(line, response, None))
        finally:
            self._running -= 1
            self._ended.set()

    def _again(self, line: Line, answer: httpx.Response, tries: int) -> bool:
        """Whether what ended this line is no fault of its own."""
        if answer.status_code == 404:
            now, model = time.monotonic(), str(line.body.get("model"))
            return now < self._unknown.setdefault(model, now) + UNKNOWN_FOR
        if answer.status_code in (429, 503):
            return str(answer.headers.get("x-should-retry")) != "false"
        starved = "x-pdserve-instance" not in answer.headers  # it got no place within the longest deadline
        return answer.status_code == 504 and (starved or tries < TRIES)

    async def _ask(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._context.app()({**scope, "extensions": {OWNER: self._store.owner}}, receive, send)
        line = asyncio.current_task()
        if line is not None and line.cancelling():  # the app answered 503, and it would ask again
            raise asyncio.CancelledError


def _result(line: Line, response: object, error: object) -> dict[str, object]:
    made = f"batch_req_{uuid.uuid4().hex}"
    return {"id": made, "custom_id": line.custom_id, "response": response, "error": error}
