"""Traces of a whole graph: a frontend, decode and prefill workers on simulated engines, and a collector that receives
their spans."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial
from itertools import count
from typing import Any
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio

from pdserve.config.addresses import traces_url
from pdserve.contract.reports import Receipt
from pdserve.observe.tracing import Tracer
from pdserve.process.worker import EngineWorker
from tests.collector import Collector, Exported, collecting
from tests.conditions import until
from tests.decode.graph import Started
from tests.frontend.conftest import Graph
from tests.frontend.model.sims import sim_workers
from tests.observe.test_traces import PARENT, is_documented

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROUTE = "POST /v1/completions"
_prompts = (list(range(start, start + 100)) for start in count(300))


Worker = Started[EngineWorker]


class TracedGraph(Graph):
    collector: Collector
    url_of_traces: str

    def workers(self, decode: int, prefill: int = 0) -> AbstractAsyncContextManager[list[Worker]]:
        return sim_workers(self, decode, prefill, traces=self.url_of_traces)

    def receipt(self, request_id: str) -> Receipt | None:
        return next(iter(self.plugins.receipts(1, None, request_id)), None)

    def ended(self, trace_id: str) -> bool:
        return ROUTE in {span.name for span in self.collector.of(trace_id)}

    async def ask(self, headers: Any, tokens: int = 100, **body: object) -> httpx.Response:
        """Post a prompt of `tokens` tokens, new to all engines."""
        asked = {"model": "demo", "prompt": next(_prompts)[:tokens], "max_tokens": 6, "temperature": 0}
        return await self.http.post("/v1/completions", json=asked | body, headers=headers)

    async def trace(self, trace_id: str, *wanted: str) -> list[Exported]:
        """Wait until the trace has exactly the `wanted` spans. Return them in order of start."""

        def names() -> list[str]:
            return sorted(span.name for span in self.collector.of(trace_id))

        with suppress(TimeoutError):
            await until(lambda: names() == sorted(wanted))
        assert names() == sorted(wanted)
        found = sorted(self.collector.of(trace_id), key=lambda span: span.start)
        assert all(is_documented(span) for span in found)
        return found


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def graph(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TracedGraph]:
    with pytest.MonkeyPatch.context() as patch, collecting() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        async with AsyncExitStack() as stack:
            graph = TracedGraph()
            graph.collector, graph.url_of_traces = collector, traces_url(collector.url)
            exporting = Tracer().exporting(graph.url_of_traces, "pdserve-frontend", graph.id)
            tracer = await stack.enter_async_context(exporting)
            await graph.start(stack, tmp_path_factory.mktemp("state"), tracer)
            yield graph


@pytest_asyncio.fixture(loop_scope="module")
async def workers(graph: TracedGraph) -> AsyncIterator[list[Worker]]:
    """A decode worker and a prefill worker."""
    async with graph.workers(1, 1) as workers:
        yield workers


@pytest.fixture
def worker(workers: list[Worker]) -> Worker:
    return workers[0]


def client_trace(flags: str = "01") -> tuple[str, dict[str, str]]:
    """Return the id of a trace that the client began, and the headers that carry the id."""
    trace_id = uuid4().hex
    return trace_id, {"traceparent": f"00-{trace_id}-{PARENT}-{flags}"}


def one(spans: list[Exported], name: str) -> Exported:
    (found,) = [span for span in spans if span.name == name]
    return found


def below(spans: list[Exported]) -> list[tuple[str, str, str]]:
    """Return each span's name, parent's name and process."""
    names = {span.span_id: span.name for span in spans} | {PARENT: "client"}
    return [(span.name, names[span.parent], span.process) for span in spans]


async def test_a_remote_request_has_a_span_for_each_hop_in_its_process(
    graph: TracedGraph, workers: list[Worker]
) -> None:
    worker, prefill = workers
    trace_id, headers = client_trace()
    before = time.time_ns()
    answer = await graph.ask({**headers, "tracestate": "vendor=x", "x-request-id": "mine"})
    assert answer.headers["x-pdserve-prefill"] == "remote"
    hops = ["admission", "queue", "prefill", "transfer", "first-step", "decode"]
    spans = await graph.trace(trace_id, ROUTE, "attempt", "generate", *hops)
    assert sorted(below(spans)) == sorted(
        [
            (ROUTE, "client", graph.id),
            ("admission", ROUTE, graph.id),
            ("attempt", ROUTE, graph.id),
            ("decode", "attempt", graph.id),
            ("generate", "attempt", worker.id),
            ("queue", "generate", worker.id),
            ("prefill", "attempt", prefill.id),
            ("transfer", "generate", worker.id),
            ("first-step", "generate", worker.id),
        ]
    )
    whole = one(spans, ROUTE)
    assert whole.tracestate == "vendor=x"
    assert before <= whole.start
    assert all(whole.start <= span.start <= span.end <= whole.end for span in spans)
    assert [span.error for span in spans if span.error is not None] == []
    assert whole.attributes["gen_ai.usage.input_tokens"] == 100
    assert whole.attributes["gen_ai.usage.output_tokens"] == 6
    receipt = graph.receipt("mine")
    assert receipt is not None
    assert receipt.trace_id == trace_id
    assert {hop.name for hop in receipt.hops} == set(hops)


@pytest.mark.parametrize("how", ["worker dies", "engine dies"])
async def test_a_migrated_request_shows_both_attempts(graph: TracedGraph, worker: Worker, how: str) -> None:
    trace_id, headers = client_trace()
    worker.engine.faults.slow = 50
    asking = asyncio.create_task(graph.ask({**headers, "x-request-id": trace_id}, tokens=9, max_tokens=20))

    def generated() -> int:
        receipt = graph.receipt(trace_id)
        return receipt.output_tokens if receipt is not None else 0

    await until(lambda: generated() > 2)
    async with graph.workers(1) as (other,):
        if how == "worker dies":
            worker.life.cancel()
        else:
            worker.engine.die()
        answer = await asking
        assert answer.json()["usage"]["completion_tokens"] == 20
        twice = ["attempt", "decode", "prefill", "generate"]
        # the worker dies before it sends these spans
        lost = ["prefill", "generate"] if how == "worker dies" else []
        wanted = list((Counter([ROUTE, "admission", *twice, *twice]) - Counter(lost)).elements())
        spans = await graph.trace(trace_id, *wanted)
    first, second = (span for span in spans if span.name == "attempt")
    assert [first.attributes["pdserve.instance"], second.attributes["pdserve.instance"]] == [
        worker.id,
        other.id,
    ]
    event = one(spans, ROUTE).events["migration"]
    assert event == {"pdserve.instance": worker.id, "pdserve.why": first.error}
    assert first.error
    assert second.error is one(spans, ROUTE).error is None


async def test_a_span_has_an_error_for_a_504_and_none_for_a_400(graph: TracedGraph, worker: Worker) -> None:
    wrong, headers = client_trace()
    assert (await graph.ask(headers, max_tokens=-1)).status_code == 400
    whole = one(await graph.trace(wrong, ROUTE, "admission"), ROUTE)
    assert (whole.error, whole.attributes["http.response.status_code"]) == (None, 400)
    late, headers = client_trace()
    worker.engine.faults.slow = 500
    assert (await graph.ask({**headers, "x-request-timeout": "0.2"}, tokens=9)).status_code == 504
    await until(lambda: {"generate", ROUTE} <= {span.name for span in graph.collector.of(late)})
    whole = one(graph.collector.of(late), ROUTE)
    assert (whole.attributes["http.response.status_code"], whole.attributes["error.type"]) == (504, "504")
    assert whole.error


async def test_only_a_sampled_request_is_traced(graph: TracedGraph, worker: Worker) -> None:
    """A local prefill is a span of the decode worker."""
    unsampled, headers = client_trace("00")
    assert (await graph.ask(headers)).status_code == 200
    trace_id, headers = client_trace()
    await graph.ask(headers, tokens=9)
    spans = await graph.trace(trace_id, ROUTE, "admission", "attempt", "generate", "prefill", "decode")
    assert ("prefill", "generate", worker.id) in below(spans)
    assert one(spans, "prefill").attributes["pdserve.why"] == "short"
    assert graph.collector.of(unsampled) == []


async def test_a_request_continues_a_trace_only_if_exactly_one_parent_is_valid(
    graph: TracedGraph, worker: Worker
) -> None:
    (first, given), (second, other) = client_trace(), client_trace()
    for wrong in (
        [("traceparent", f"00-{'1' * 32}-{PARENT}-01-more")],
        [("traceparent", "é" * 55)],
        [("tracestate", "vendor=x")],
        [*given.items(), *other.items()],
    ):
        name = uuid4().hex
        raw = [(key, value.encode("latin-1")) for key, value in [*wrong, ("x-request-id", name)]]
        assert (await graph.ask(raw, tokens=9)).status_code == 200
        receipt = graph.receipt(name)
        assert receipt is not None
        assert receipt.trace_id not in (first, second, "")
        await until(partial(graph.ended, receipt.trace_id))
        assert one(graph.collector.of(receipt.trace_id), ROUTE).parent == ""
