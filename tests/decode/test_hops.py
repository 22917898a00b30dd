"""The hops of a request that a decode worker reports: their workers and reasons."""

import asyncio
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from pdserve.contract.messages import Hop, Outputs, Placed
from pdserve.contract.reports import HOPS, MIN_HOP_SECONDS
from pdserve.decode.hops import RequestHops
from pdserve.decode.policy import decision
from pdserve.engine.sim.engine import SimEngine
from tests.conditions import until
from tests.decode.graph import (
    LONG,
    SHORT,
    Answered,
    FrontendStream,
    Prefill,
    WorkerGraph,
    counted,
    failing,
)
from tests.engine.sims import body


def hops_of(answered: Answered) -> list[Hop]:
    """Return the hops; assert that they follow one another."""
    assert answered.placed is not None
    hops = answered.placed.hops
    assert {hop.name for hop in hops} <= set(HOPS)
    assert all(early.start + early.seconds <= late.start + 1e-6 for early, late in pairwise(hops))
    return hops


def shown(hops: list[Hop]) -> list[str]:
    """Return name, instance and the start of `why` of each hop, without `engine-queue`, which a busy machine may
    add."""
    words = (
        (hop.name, hop.instance, hop.why.partition(":")[0]) for hop in hops if hop.name != "engine-queue"
    )
    return [" ".join(filter(None, each)) for each in words]


async def test_hops_of_a_local_and_a_remote_prefill(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream
) -> None:
    def kinds() -> list[str]:
        return [type(each).__name__ for each in frontend.messages if isinstance(each, Placed | Outputs)]

    moved = counted("pdserve_kv_transfer_bytes_total")
    assert shown(hops_of(await frontend.ask(SHORT))) == ["prefill decode-0 short"]
    assert kinds()[:3] == ["Placed", "Placed", "Outputs"]
    frontend.messages.clear()
    began = time.monotonic()
    hops = hops_of(await frontend.ask(LONG))
    assert hops[-1].start + hops[-1].seconds <= time.monotonic() - began
    there = ["queue long", "prefill prefill-0"]
    assert shown(hops) == [*there, "transfer prefill-0", "first-step decode-0"]
    assert hops[1].seconds > len(LONG) / 1e6
    assert kinds()[:4] == ["Placed", "Outputs", "Placed", "Outputs"]
    first = frontend.messages[0]
    assert isinstance(first, Placed)
    assert shown(first.hops) == there
    assert counted("pdserve_kv_transfer_bytes_total") == moved + 32 * 16 * 4096
    assert (await frontend.ask(LONG)).way == ("local", "short"), "the prefix is cached by now"
    await prefill.frees_all()
    await graph.frees_all()


async def test_a_request_of_one_token_never_enters_the_decode_engine(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream
) -> None:
    before = counted("pdserve_prefill_total", mode="remote", reason="long")
    assert shown(hops_of(await frontend.ask(LONG, 1))) == ["queue long", "prefill prefill-0"]
    await prefill.frees_all()
    assert graph.decode_engine.prefix_hit(LONG, body()) == 0
    assert not len(graph.decode.requests)
    assert counted("pdserve_prefill_total", mode="remote", reason="long") == before + 1


@pytest.mark.parametrize("pulled", [True, False])
async def test_hops_of_a_timeout(
    graph: WorkerGraph, frontend: FrontendStream, monkeypatch: pytest.MonkeyPatch, pulled: bool
) -> None:
    monkeypatch.setattr(decision, "MIN_TIMEOUT", 0.3)
    monkeypatch.setattr(decision, "TIMEOUT_FACTOR", 0.0)
    if pulled:
        (await graph.prefill()).engine.faults.going.clear()
        ways, waited = ["prefill prefill-0", "fallback prefill-0 timeout"], "no answer of prefill-0"
    else:
        acted = await graph.act_prefill()
        ways, waited = ["fallback timeout"], "no worker pulled it"
    with failing("timeout"):
        hops = hops_of(await frontend.ask(LONG))
    assert shown(hops) == ["queue long", *ways, "prefill decode-0 fallback"]
    assert hops[-2].why == f"timeout: {waited} within 0.3 s"
    assert hops[-2].start >= 0.3
    if not pulled:
        assert await acted.queue.pull(1, 0.1) == [], "the request was taken back from the queue"


@pytest.mark.usefixtures("brief_transfers")
async def test_hops_of_a_failed_transfer(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream
) -> None:
    """The first token does not wait for the KV, and the request continues after that token."""
    prefill.engine.faults.drop_transfers = True
    answered = frontend.answered[request_id := await frontend.submit(LONG)]
    await until(lambda: bool(answered.tokens))
    assert graph.decode.requests.tokens == len(LONG) + 1, "the first token counts as load"
    assert answered.way == ("remote", "long")
    hops = hops_of(await frontend.end_of(request_id))
    assert answered.way == ("local", "transfer")
    ways = ["transfer prefill-0", "fallback prefill-0 transfer", "prefill decode-0 transfer"]
    assert shown(hops) == ["queue long", "prefill prefill-0", *ways]
    assert hops[2].seconds >= 0.3, "until the read was given up"
    assert "no KV from prefill-0" in hops[3].why
    prefill.engine.faults.drop_transfers = False
    await graph.frees_all()


async def held_back(engine: SimEngine) -> None:
    """Give the engine no slot for the next request until it has waited for more than `MIN_HOP_SECONDS`."""
    model = engine._model
    engine._model = replace(model, max_num_seqs=0)
    await until(lambda: bool(engine._waiting))
    since = time.monotonic()
    await until(lambda: time.monotonic() > since + MIN_HOP_SECONDS)
    engine._model = model
    engine._work.set()


@pytest.mark.parametrize(("name", "prompt"), [("decode-0", SHORT), ("prefill-0", LONG)])
async def test_a_wait_in_an_engine_is_a_hop(
    graph: WorkerGraph, prefill: Prefill, frontend: FrontendStream, name: str, prompt: list[int]
) -> None:
    engine = prefill.engine if prompt == LONG else graph.decode_engine
    request, _ = await asyncio.gather(frontend.submit(prompt), held_back(engine))
    hops = [hop for hop in hops_of(await frontend.end_of(request)) if hop.instance == name]
    assert [hop.name for hop in hops[:2]] == ["engine-queue", "prefill"]
    assert hops[0].seconds >= MIN_HOP_SECONDS


async def test_hops_of_a_redelivered_prompt(graph: WorkerGraph, frontend: FrontendStream) -> None:
    acted = await graph.act_prefill()
    before = counted("pdserve_prefill_queue_wait_seconds_count")
    request = await frontend.submit(LONG)
    (delivery,) = await acted.pull()
    await acted.start(request, delivery.queued)
    await graph.prefill()
    hops = hops_of(await frontend.end_of(request))
    assert shown(hops)[:3] == ["queue long", "prefill prefill-x", "prefill prefill-0"]
    assert hops[1].seconds > 0.3, "until the queue delivered it again"
    assert counted("pdserve_prefill_queue_wait_seconds_count") == before, "redeliveries do not count"


@pytest.mark.parametrize(
    ("pulled", "queued", "computed", "expected"),
    [
        ([], 0.0, 2.0, [("queue", 0.5, 1.0), ("prefill", 1.5, 2.0)]),
        ([], 7.0, 9.0, [("queue", 0.5, 3.0), ("prefill", 3.5, 0.0)]),
        ([("x", 0.5)], 1.5, 1.0, [("queue", 0.5, 0.5), ("prefill", 1.0, 1.0), ("prefill", 2.0, 1.0)]),
    ],
    ids=["queue time unknown", "times longer than the wait", "delivered again"],
)
def test_the_hops_of_a_remote_prefill_add_up_to_its_wait(
    pulled: list[tuple[str, float]], queued: float, computed: float, expected: list[tuple[str, float, float]]
) -> None:
    hops = RequestHops(100.0)
    hops.asked(100.5, "long")
    for worker, after in pulled:
        hops.pulled(worker, after)
    hops.answered("p", queued, computed, 103.5)
    assert [(hop.name, hop.start, hop.seconds) for hop in hops.known] == expected
    assert [hop.instance for hop in hops.known] == ["", *(worker for worker, _ in pulled), "p"]
