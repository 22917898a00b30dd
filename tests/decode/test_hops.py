"""The hops of a request that a decode worker reports: where they were, and why."""

import asyncio
import time
from dataclasses import replace

import pytest

from pdserve.decode import policy
from pdserve.decode.hops import RequestHops
from pdserve.engine.sim.engine import SimEngine
from pdserve.messages import Hop, Outputs, Placed
from pdserve.watch import BRIEF, HOPS
from tests.conditions import until
from tests.decode.graph import (
    LONG,
    SHORT,
    ActedPrefill,
    Answered,
    FrontendStream,
    Prefill,
    WorkerGraph,
    counted,
)

Parts = list[tuple[str, str, str]]
"""name, instance, and the first word of why"""


def parts(hops: list[Hop]) -> Parts:
    """Without the waits in engines, which a busy machine may make long."""
    return [(hop.name, hop.instance, hop.why.partition(":")[0]) for hop in hops if hop.name != "engine-queue"]


def fit(answered: Answered, whole: float) -> list[Hop]:
    """The hops of a request, which took `whole` seconds: one after the other, and within that time."""
    assert answered.placed is not None
    hops, at = answered.placed.hops, 0.0
    for hop in hops:
        assert hop.name in HOPS
        assert hop.start >= at - 1e-6
        at = hop.start + hop.seconds
    assert at <= whole
    return hops


async def way(frontend: FrontendStream, prompt: list[int], max_tokens: int = 4) -> list[Hop]:
    began = time.monotonic()
    answered = await frontend.ask(prompt, max_tokens)
    return fit(answered, time.monotonic() - began)


async def test_a_local_prefill(frontend: FrontendStream) -> None:
    assert parts(await way(frontend, SHORT)) == [("prefill", "decode-0", "no-prefill-worker")]
    kinds = [type(message) for message in frontend.messages if not hasattr(message, "load")]
    assert kinds[:3] == [Placed, Placed, Outputs]


async def test_a_remote_prefill_with_the_first_token(prefill: Prefill, frontend: FrontendStream) -> None:
    hops = await way(frontend, LONG)
    there = [("queue", "", "long"), ("prefill", "prefill-0", "")]
    assert parts(hops) == [*there, ("transfer", "prefill-0", ""), ("first-step", "decode-0", "")]
    assert hops[1].seconds > len(LONG) / 1e6
    messages = [message for message in frontend.messages if isinstance(message, Placed | Outputs)]
    assert [type(message) for message in messages[:4]] == [Placed, Outputs, Placed, Outputs]
    first = messages[0]
    assert isinstance(first, Placed)
    assert parts(first.hops) == there
    assert await way(frontend, list(range(700, 1200)), 1), "and there is no step of the decode engine"
    assert parts(frontend.messages[-2].hops) == there  # type: ignore[union-attr]


@pytest.mark.parametrize("pulled", [True, False])
async def test_a_timeout(graph: WorkerGraph, monkeypatch: pytest.MonkeyPatch, pulled: bool) -> None:
    monkeypatch.setattr(policy, "FLOOR", 0.3)
    monkeypatch.setattr(policy, "SLACK", 0.0)
    if pulled:
        (await graph.prefill()).engine.faults.going.clear()
    else:
        await graph.act_prefill()
    hops = await way(await graph.frontend(), LONG)
    at = [("prefill", "prefill-0", "")] if pulled else []
    assert parts(hops) == [
        ("queue", "", "long"),
        *at,
        ("fallback", "prefill-0" if pulled else "", "timeout"),
        ("prefill", "decode-0", "fallback"),
    ]
    waited = "no answer of prefill-0" if pulled else "no worker took it"
    assert hops[-2].why == f"timeout: {waited} within 0.3 s"
    assert hops[-2].start >= 0.3


@pytest.mark.usefixtures("brief_transfers")
async def test_a_transfer_that_fails(prefill: Prefill, frontend: FrontendStream) -> None:
    prefill.engine.faults.drop_transfers = True
    hops = await way(frontend, LONG)
    assert parts(hops) == [
        ("queue", "", "long"),
        ("prefill", "prefill-0", ""),
        ("transfer", "prefill-0", ""),
        ("fallback", "prefill-0", "transfer"),
        ("prefill", "decode-0", "transfer"),
    ]
    assert hops[2].seconds >= 0.3, "until the read was given up"
    assert "no KV from prefill-0" in hops[3].why


async def test_a_prompt_that_is_delivered_again(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream
) -> None:
    """From one prefill worker, which had it for a while, to another one."""
    before = counted("pdserve_prefill_queue_wait_seconds_count")
    request = await frontend.submit(LONG)
    (delivery,) = await acted.pull()
    await acted.start(request, delivery.queued)
    await graph.prefill()
    hops = fit(await frontend.end_of(request), 30.0)
    assert parts(hops)[:4] == [
        ("queue", "", "long"),
        ("prefill", "prefill-x", ""),
        ("prefill", "prefill-0", ""),
        ("transfer", "prefill-0", ""),
    ]
    assert hops[1].seconds > 0.3, "until the queue gave it to another one"
    assert counted("pdserve_prefill_queue_wait_seconds_count") == before, "nothing is counted twice"


async def test_a_prompt_waits_for_its_turn() -> None:
    async with WorkerGraph(engine_args={"long-prefill-token-threshold": 16}) as graph:
        graph.decode_engine.faults.slow = 50.0
        frontend = await graph.frontend()
        first = await frontend.submit(LONG)
        hops = await way(frontend, list(range(700, 1200)))
        await frontend.end_of(first)
    assert parts(hops) == [("turn", "", ""), ("prefill", "decode-0", "no-prefill-worker")]


async def held_back(engine: SimEngine) -> None:
    """Give the engine no place for the next request, until that has waited for longer than `BRIEF`."""
    model = engine._model
    engine._model = replace(model, max_num_seqs=0)
    await until(lambda: bool(engine._waiting))
    since = time.monotonic()
    await until(lambda: time.monotonic() > since + BRIEF)
    engine._model = model
    engine._work.set()


async def test_a_prompt_that_waits_in_the_decode_engine(graph: WorkerGraph, frontend: FrontendStream) -> None:
    request, _ = await asyncio.gather(frontend.submit(SHORT), held_back(graph.decode_engine))
    hops = fit(await frontend.end_of(request), 30.0)
    assert [(hop.name, hop.instance) for hop in hops] == [
        ("engine-queue", "decode-0"),
        ("prefill", "decode-0"),
    ]
    assert hops[0].seconds >= BRIEF


async def test_a_prompt_that_waits_in_the_prefill_engine(prefill: Prefill, frontend: FrontendStream) -> None:
    request, _ = await asyncio.gather(frontend.submit(LONG), held_back(prefill.engine))
    hops = fit(await frontend.end_of(request), 30.0)
    assert [(hop.name, hop.instance) for hop in hops[:3]] == [
        ("queue", ""),
        ("engine-queue", "prefill-0"),
        ("prefill", "prefill-0"),
    ]
    assert hops[1].seconds >= BRIEF


@pytest.mark.parametrize(
    ("queued", "computed", "queue", "prefill"),
    [(0.0, 2.0, 1.0, 2.0), (7.0, 9.0, 3.0, 0.0)],
    ids=["unknown", "late"],
)
def test_the_hops_of_a_remote_prefill_are_as_long_as_the_wait_for_it(
    queued: float, computed: float, queue: float, prefill: float
) -> None:
    hops = RequestHops(100.0)
    hops.asked(100.5, "long")
    hops.answered("p", queued, computed, 103.5)
    assert hops.known == [Hop("queue", 0.5, queue, why="long"), Hop("prefill", 0.5 + queue, prefill, "p")]
