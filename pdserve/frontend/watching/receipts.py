"""Keep the receipts of this frontend's requests, running and lately ended, and count in ticks what it served. That
costs a record for each request, and nothing for a token."""

import asyncio
import time
from collections import Counter, deque
from itertools import pairwise

from msgspec.structs import replace
from prometheus_client import Histogram
from starlette.requests import Request

from pdserve.frontend.edge.answer import ResponseWriter
from pdserve.frontend.edge.trace import CLIENT_LEFT, MAX_WHY
from pdserve.frontend.watching.spans import begin_span, end_span
from pdserve.observe.metrics import ITL, TTFT
from pdserve.observe.tracing import Tracer
from pdserve.watch import BUCKETS, KEPT_FOR, MAX_ASTRAY, MAX_TICKS, MAX_TOLD, MOST_KEPT, TICK, Receipt, Tick


class Receipts:
    def __init__(self, frontend: str, tracer: Tracer) -> None:
        self._tracer = tracer
        self.ticks: deque[Tick] = deque(maxlen=MAX_TICKS)
        self._frontend = frontend
        self._running: dict[ResponseWriter, None] = {}
        self._over: deque[tuple[float, Receipt]] = deque(maxlen=MOST_KEPT)
        """with the monotonic time of arrival; in the order of their ends"""
        self._astray: deque[tuple[float, Receipt]] = deque(maxlen=MAX_ASTRAY)
        """the last receipts of requests that went astray"""
        self._counts = Counter[str]()
        """of the current tick"""
        self._tokens = 0
        """output tokens of all requests that are over"""

    def begin(self, request: Request, response: ResponseWriter) -> None:
        response.trace.span = begin_span(self._tracer, request, response.trace)
        self._running[response] = None

    def end(self, response: ResponseWriter) -> None:
        """Keep the request's receipt; do nothing if it has not begun."""
        if response not in self._running:
            return
        del self._running[response]
        now, trace = time.monotonic(), response.trace
        self._tokens += trace.output_tokens
        if not response.status and not trace.model:
            return  # its client left before the body was complete
        receipt = self._receipt(response, now, running=False)
        self._forget(now)
        self._over.append((trace.started, receipt))
        if receipt.astray:
            self._astray.append((trace.started, receipt))
        if trace.span is not None:
            end_span(trace.span, receipt, response.failure, trace.started)
        code = response.failure.status if response.failure is not None else receipt.status
        self._counts["requests"] += 1
        self._counts["failed"] += code >= 500
        self._counts["refused"] += code == 429

    def newest(self, limit: int, key: str | None = None, request_id: str = "") -> list[Receipt]:
        """Return receipts, the newest first: with `key` those of this API key, with `request_id` those of this id."""
        now, found = time.monotonic(), list[tuple[float, Receipt | ResponseWriter]]()
        self._forget(now)
        for response in self._running:
            if key in (None, response.trace.key) and request_id in ("", response.trace.request_id):
                found.append((response.trace.started, response))
        for started, receipt in self._over:
            if key in (None, receipt.key) and request_id in ("", receipt.request_id):
                found.append((started, receipt))
        found.sort(key=lambda item: item[0], reverse=True)
        return [
            replace(item, age=now - started)
            if isinstance(item, Receipt)
            else self._receipt(item, now, running=True)
            for started, item in found[:limit]
        ]

    def told(self) -> list[Receipt]:
        """Return what dashboards and `status` get: the newest, and older ones of requests that went astray."""
        now, newest = time.monotonic(), self.newest(MAX_TOLD)
        told_from = now - newest[-1].age if len(newest) == MAX_TOLD else 0.0
        astray = [
            replace(receipt, age=now - started)
            for started, receipt in reversed(self._astray)
            if now - KEPT_FOR < started < told_from
        ]
        return newest + astray

    async def tick(self) -> None:
        """End a tick every TICK seconds. Never returns."""
        before = _observed(TTFT), _observed(ITL), self._sent()
        while True:
            await asyncio.sleep(TICK)
            now = _observed(TTFT), _observed(ITL), self._sent()
            ttft, itl = (
                [b - a for a, b in zip(*pair, strict=True)] for pair in zip(before[:2], now[:2], strict=True)
            )
            counts, self._counts = self._counts, Counter()
            self.ticks.append(
                Tick(
                    **counts,
                    tokens=now[2] - before[2],
                    ttft=ttft if any(ttft) else [],
                    itl=itl if any(itl) else [],
                )
            )
            before = now
            self._forget(time.monotonic())

    def _sent(self) -> int:
        """Count the output tokens of all requests so far."""
        return self._tokens + sum(response.trace.output_tokens for response in self._running)

    def _forget(self, now: float) -> None:
        while self._over and self._over[0][0] + self._over[0][1].seconds < now - KEPT_FOR:
            self._over.popleft()

    def _receipt(self, response: ResponseWriter, now: float, *, running: bool) -> Receipt:
        trace = response.trace
        age, failure = now - trace.started, response.failure
        return Receipt(
            request_id=trace.request_id,
            frontend=self._frontend,
            path=trace.path,
            age=age,
            seconds=age,
            running=running,
            model=trace.model,
            key=trace.key,
            status=response.status or (0 if running else CLIENT_LEFT),
            # an error about a wrong request may quote it, and its client has been told
            error=failure.message[:MAX_WHY]
            if failure is not None and failure.status not in (400, 404, 422)
            else "",
            prefill=trace.prefill,
            reason=trace.reason,
            prompt_tokens=trace.prompt_tokens,
            cached_tokens=trace.cached_tokens,
            output_tokens=trace.output_tokens,
            ttft=trace.ttft,
            retries=trace.retries,
            instances=trace.instances,
            hops=trace.hops.until(now),
            trace_id=trace.span.trace_id if trace.span is not None else "",
        )


def _observed(histogram: Histogram) -> list[int]:
    """Count the observations in each bucket so far, of all models."""
    below = Counter[float]()
    for metric in histogram.collect():
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                below[float(sample.labels["le"])] += int(sample.value)
    counts = [0, *(below[bound] for bound in (*BUCKETS, float("inf")))]
    return [high - low for low, high in pairwise(counts)]
