"""A decode worker's reports of its links to prefill workers."""

from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from pdserve.contract.messages import PrefillStarted
from pdserve.contract.reports import LinkState
from pdserve.decode.peers.prefill_workers import AVOID_FOR
from pdserve.decode.requests import Phase
from tests.conditions import until
from tests.decode.graph import LONG, SHORT, FrontendStream, Prefill, WorkerGraph


def links(graph: WorkerGraph) -> dict[str, LinkState]:
    return {link.to: link for link in graph.decode.watched().links}


def handshake_failures(worker: str) -> float | None:
    labels = {"model": "demo", "worker": worker}
    return REGISTRY.get_sample_value("pdserve_kv_handshake_failures_total", labels)


async def test_links_count_requests_and_reads(
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


async def test_a_worker_with_a_broken_side_channel_is_avoided_for_a_time(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream
) -> None:
    prefill.engine.faults.deaf = True
    assert (await frontend.ask(LONG)).way[0] == "local"
    link = links(graph)["prefill-0"]
    assert (link.pulls, link.failures, link.up) == (0, 1, False)
    assert link.failure.startswith("transfer: prefill-0 closed the connection")
    assert handshake_failures("prefill-0") == 1
    assert (await frontend.ask(LONG[1:])).way == ("local", "no-prefill-worker")
    await graph.prefill("prefill-1")
    for number in range(2, 6):  # either worker may pull it
        await frontend.ask(LONG[number:])
    prefill.engine.faults.deaf = False
    graph.decode._workers._avoided["prefill-0"] -= AVOID_FOR
    assert len(graph.decode._workers.available()) == 2
    prefill.life.cancel()
    await until(lambda: links(graph).keys() == {"prefill-1"})
    await until(lambda: handshake_failures("prefill-0") is None)


async def test_a_read_counts_for_the_worker_that_has_the_kv(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream
) -> None:
    """Another worker began the prompt, too. Its message comes after the answer."""
    graph.decode_engine._model = replace(graph.decode_engine._model, transfer_seconds=0.5)
    request = await frontend.submit(LONG)
    await until(lambda: any(each.phase is Phase.RUNNING for each in graph.decode.requests))
    other = await graph.act_prefill()
    await other.answer(PrefillStarted(request, other.name))
    await frontend.end_of(request)
    assert {name: link.pulls for name, link in links(graph).items()} == {prefill.id: 1, other.name: 0}


async def test_slow_transfers_change_the_reported_speed_of_a_link(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream
) -> None:
    for number in range(3):
        await frontend.ask([number, *LONG])
    before = links(graph)["prefill-0"]
    graph.decode_engine._model = replace(graph.decode_engine._model, transfer_seconds=0.5)
    for number in range(3, 5):
        await frontend.ask([number, *LONG])
    after = links(graph)["prefill-0"]
    assert (after.pull_seconds or 0) > (before.pull_seconds or 1)
    assert (after.bytes_per_second or 0) < (before.bytes_per_second or 0)


async def test_no_metric_remains_of_a_worker_that_leaves_during_a_request(
    graph: WorkerGraph, frontend: FrontendStream
) -> None:
    """The request falls back to local prefill just after the decode worker has dropped the link."""
    acted = await graph.act_prefill("prefill-left")
    assert links(graph) == {"prefill-left": LinkState("prefill-left", "kv")}, "an unused link"
    request = await frontend.submit(LONG)
    await acted.pull()
    await acted.start(request)
    await acted.leave()
    assert (await frontend.end_of(request)).way == ("local", "fallback")
    assert handshake_failures("prefill-left") is None


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 4),
        ({"policy": "adaptive"}, 0),
        ({"conditional_disagg": False}, 0),
        ({"remote_prefill": False}, 0),
    ],
    ids=["threshold", "adaptive", "always", "never"],
)
async def test_the_load_states_the_limit_of_the_queue(settings: dict[str, object], limit: int) -> None:
    """Only the thresholds bound the prefill queue (0: no limit). Without remote prefill, no links are reported."""
    async with WorkerGraph(**settings) as graph:  # type: ignore[arg-type]
        assert graph.decode.load().queue_limit == limit
        await graph.act_prefill()
        assert bool(links(graph)) is settings.get("remote_prefill", True)
