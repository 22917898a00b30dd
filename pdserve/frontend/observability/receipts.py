"""Receipts of this frontend's running and recent requests, the pages `/requests`, and ticks that count served tokens.
The cost is a record per request and nothing per token."""

import asyncio
import time
from collections import Counter, deque
from itertools import pairwise

from msgspec.structs import replace
from prometheus_client import Histogram
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.contract.records import Role
from pdserve.contract.reports import (
    BUCKETS,
    MAX_DETOURS,
    MAX_RECEIPTS,
    MAX_REPORTED_RECEIPTS,
    MAX_TICKS,
    RECEIPT_LIFETIME,
    TICK,
    ProcessReport,
    Receipt,
    Tick,
    newest_receipts,
)
from pdserve.frontend.edge.request_record import RequestRecord, receipt_of
from pdserve.frontend.edge.response import HttpError, ResponseWriter
from pdserve.frontend.plugins import Plugin, PluginContext, json_response, query_limit
from pdserve.observe.metrics import ITL, TTFT
from pdserve.observe.process_pages import read_receipts

MAX_ASKING = 4
"""Maximum of requests for receipts that poll the other frontends at the same time."""


class Receipts(Plugin):
    def __init__(self, context: PluginContext) -> None:
        self._own, self._running = context.id, context.running
        self._view, self._keys = context.view, context.keys
        self.routes = [Route("/requests", self._list), Route("/requests/{id}", self._one)]
        self.work = {"receipts": self.tick}
        self._asking = asyncio.Semaphore(MAX_ASKING)
        self._ticks: deque[Tick] = deque(maxlen=MAX_TICKS)
        self._over: deque[tuple[float, Receipt]] = deque(maxlen=MAX_RECEIPTS)
        """Monotonic time of arrival, and receipt, of finished requests, in the order in which they finished."""
        self._detours: deque[tuple[float, Receipt]] = deque(maxlen=MAX_DETOURS)
        """The same for the last requests with a detour: a fallback or a migration."""
        self._counts = Counter[str]()
        """Counts of the current tick."""
        self._tokens = 0
        """Output tokens of all finished requests."""

    def end(self, record: RequestRecord) -> None:
        if not record.begun:
            return
        receipt = record.receipt
        self._tokens += receipt.output_tokens
        self._forget(time.monotonic())
        self._over.append((record.started, receipt))
        if receipt.has_detour:
            self._detours.append((record.started, receipt))
        self._counts["requests"] += 1
        self._counts["failed"] += record.code >= 500
        self._counts["refused"] += record.code == 429
        self._counts["promised"] += receipt.promise != ""
        self._counts["kept"] += receipt.promise == "kept"

    def add_to_report(self, report: ProcessReport) -> ProcessReport:
        return replace(report, ticks=list(self._ticks), receipts=self._reported())

    def receipts(self, limit: int, key: str | None = None, request_id: str = "") -> list[Receipt]:
        now, matching = time.monotonic(), list[tuple[float, Receipt | ResponseWriter]]()
        self._forget(now)
        for response in self._running:
            if key in (None, response.state.key) and request_id in ("", response.state.request_id):
                matching.append((response.state.started, response))
        for started, receipt in self._over:
            if key in (None, receipt.key) and request_id in ("", receipt.request_id):
                matching.append((started, receipt))
        matching.sort(key=lambda item: item[0], reverse=True)
        return [
            replace(item, age=now - started)
            if isinstance(item, Receipt)
            else receipt_of(item, self._own, now, running=True)
            for started, item in matching[:limit]
        ]

    def _reported(self) -> list[Receipt]:
        """Return the newest receipts, and older ones with a fallback or a migration, for dashboards and `status`."""
        now, newest_ones = time.monotonic(), self.receipts(MAX_REPORTED_RECEIPTS)
        since = now - newest_ones[-1].age if len(newest_ones) == MAX_REPORTED_RECEIPTS else 0.0
        older = [
            replace(receipt, age=now - started)
            for started, receipt in reversed(self._detours)
            if now - RECEIPT_LIFETIME < started < since
        ]
        return newest_ones + older

    async def tick(self) -> None:
        """End a tick every TICK seconds. Never returns."""
        before = _observed(TTFT), _observed(ITL), self._sent()
        while True:
            await asyncio.sleep(TICK)
            now = _observed(TTFT), _observed(ITL), self._sent()
            counts, self._counts = self._counts, Counter()
            ttft, itl = map(_since, before[:2], now[:2])
            self._ticks.append(Tick(**counts, tokens=now[2] - before[2], ttft=ttft, itl=itl))
            before = now
            self._forget(time.monotonic())

    def _sent(self) -> int:
        """Return the output tokens of all requests so far."""
        return self._tokens + sum(response.state.output_tokens for response in self._running)

    def _forget(self, now: float) -> None:
        while self._over and self._over[0][0] + self._over[0][1].seconds < now - RECEIPT_LIFETIME:
            self._over.popleft()

    # its pages

    async def _list(self, request: Request) -> Response:
        limit = query_limit(request, 20, MAX_REPORTED_RECEIPTS)
        return json_response({"object": "list", "data": await self._find(request, limit)})

    async def _one(self, request: Request) -> Response:
        request_id = request.path_params["id"]
        if receipts := await self._find(request, 1, request_id):
            return json_response(receipts[0])
        kept = f"the receipts of its last {MAX_RECEIPTS:,} requests, for {RECEIPT_LIFETIME / 60:g} minutes"
        raise HttpError(404, f"there is no receipt of the request {request_id}: a frontend keeps {kept}")

    async def _find(self, request: Request, limit: int, request_id: str = "") -> list[Receipt]:
        """Return the receipts that the key may see, from all frontends. For one id, this frontend's own is enough."""
        viewer = self._keys.viewer(request.headers)
        asked = limit, None if viewer.everything else viewer.key, request_id
        receipts = self.receipts(*asked)
        others = [other for other in self._view.instances(Role.FRONTEND) if other.id != self._own]
        if others and not (request_id and receipts):
            async with self._asking:
                receipts = newest_receipts(limit, receipts, await read_receipts(others, *asked))
        return receipts


def _since(before: list[int], now: list[int]) -> list[int]:
    counts = [late - early for early, late in zip(before, now, strict=True)]
    return counts if any(counts) else []


def _observed(histogram: Histogram) -> list[int]:
    """Return the observations in each bucket so far, summed over models."""
    below = Counter[float]()
    for metric in histogram.collect():
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                below[float(sample.labels["le"])] += int(sample.value)
    counts = [0, *(below[bound] for bound in (*BUCKETS, float("inf")))]
    return [high - low for low, high in pairwise(counts)]
