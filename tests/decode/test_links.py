"""What a decode worker reports of its links to prefill workers, and of its connection to NATS."""

from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from pdserve.watch import LinkState
from tests.conditions import until
from tests.decode.graph import LONG, SHORT, ActedPrefill, FrontendStream, Prefill, WorkerGraph


def links(graph: WorkerGraph) -> dict[str, LinkState]:
    return {link.to: link for link in graph.decode.watched().links}


def handshake_failures(worker: str) -> float | None:
    labels = {"model": "demo", "worker": worker}
    return REGISTRY.get_sample_value("pdserve_kv_handshake_failures_total", labels)


async def test_of_a_link_nothing_is_known_before_it_is_used(graph: WorkerGraph, acted: ActedPrefill) -> None:
    assert links(graph) == {"prefill-x": LinkState("prefill-x", "kv")}


async def test_requests_that_are_there_and_what_was_read(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream
) -> None:
    prefill.engine.faults.going.clear()
    request = await frontend.submit(LONG)
    await until(lambda: links(graph)["prefill-0"].requests == 1)
    prefill.engine.faults.going.set()
    await frontend.end_of(request)
    await frontend.ask(SHORT)
    link = links(graph)["prefill-0"]
    assert (link.requests, link.pulls, link.failures, link.up) == (0, 1, 0, True)
    assert 0 < (link.pull_seconds or 0) < 5
    assert (link.bytes_per_second or 0) > 0


async def test_a_slow_link_stands_out(graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream) -> None:
    """Within a few requests, beside one that was as slow before."""
    for number in range(3):
        await frontend.ask([number, *LONG])
    before = links(graph)["prefill-0"]
    graph.decode_engine._model = replace(graph.decode_engine._model, transfer_seconds=0.5)
    for number in range(3, 5):
        await frontend.ask([number, *LONG])
    after = links(graph)["prefill-0"]
    assert (after.pull_seconds or 0) > (before.pull_seconds or 1)
    assert (after.bytes_per_second or 0) < (before.bytes_per_second or 0)


async def test_reads_that_fail_and_a_worker_that_goes(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream
) -> None:
    prefill.engine.faults.deaf = True
    await frontend.ask(LONG)
    link = links(graph)["prefill-0"]
    assert (link.pulls, link.failures, link.up) == (0, 1, False)
    assert link.failure.startswith("transfer: prefill-0 hangs up")
    assert handshake_failures("prefill-0") == 1
    prefill.life.cancel()
    await until(lambda: not links(graph))
    await until(lambda: handshake_failures("prefill-0") is None)


async def test_nothing_is_kept_of_a_worker_that_goes_with_a_request(
    graph: WorkerGraph, frontend: FrontendStream
) -> None:
    """Which is given up a moment after its link was forgotten."""
    acted, request = await graph.act_prefill("prefill-left"), await frontend.submit(LONG)
    await acted.pull()
    await acted.start(request)
    await acted.leave()
    assert (await frontend.end_of(request)).way == ("local", "fallback")
    assert handshake_failures("prefill-left") is None


async def test_a_graph_without_remote_prefill_has_no_links() -> None:
    async with WorkerGraph(remote_prefill=False) as graph:
        await graph.act_prefill()
        assert links(graph) == {}
        assert graph.decode.load().queue_limit == 0


@pytest.mark.parametrize(
    ("settings", "limit"),
    [({}, 4), ({"policy": "adaptive"}, 0), ({"conditional_disagg": False}, 0)],
    ids=["threshold", "adaptive", "always"],
)
async def test_the_limit_of_the_queue(settings: dict[str, object], limit: int) -> None:
    async with WorkerGraph(**settings) as graph:  # type: ignore[arg-type]
        assert graph.decode.load().queue_limit == limit
