"""The expected number of broken promises, and what decisions by it keep in virtual time."""

import math
from dataclasses import replace
from itertools import product

import pytest

from pdserve.config.schema import DecodeSection
from pdserve.decode.estimate import Estimates
from pdserve.decode.promises import Stakes
from pdserve.messages import Promise
from pdserve.slo import MATTERS, late, torn
from tests.conditions import until
from tests.decode.graph import LONG, ActedPrefill, FrontendStream, WorkerGraph
from tests.decode.virtual import ADAPTIVE, ALL_LOCAL, ALL_REMOTE, NO_PROMISE, Promised, VirtualGraph

INF = math.inf
NOTHING = Stakes(left=INF, gap=INF, plain=0.01, step=0.05, beside=0.05, chunks=False, handover=0.02)


@pytest.mark.parametrize(("seconds", "left"), [(1.0, 0.0), (1.0, -1.0), (1.0, 0.5)])
def test_what_cannot_come_in_time_is_late(seconds: float, left: float) -> None:
    assert late(seconds, left) == 1.0


def test_what_is_not_promised_does_not_break() -> None:
    assert late(1e9, INF) == torn(1e9, INF) == 0.0
    assert NOTHING.broken_here(9.0, 9.0) == NOTHING.broken_there(9.0, 9.0, 9.0) == 0.0


@pytest.mark.parametrize(
    ("changes", "here", "there"),
    [
        pytest.param({"left": 1.0}, 0.5, 0.5, id="its own first token"),
        pytest.param({"gaps": [0.05, 0.05, 0.2]}, 2.0, 0.0, id="gaps of streams"),
        pytest.param({"coming": [0.045, 0.045]}, 2.0, 0.0, id="first gaps of those whose KV comes"),
        pytest.param({"gap": 0.045, "newcomers": 3.0}, 3.0, 0.0, id="and of those that come meanwhile"),
        pytest.param({"gap": 0.045, "chunks": True}, 0.0, 1.0, id="its own, behind a chunk"),
        pytest.param({"gap": 0.01}, 1.0, 1.0, id="steps are too long in any case"),
        pytest.param({"here": [(0.5, 1.0)]}, 1.0, 0.0, id="first tokens of those that wait here"),
        pytest.param({"there": [(0.5, 1.0)]}, 0.0, 1.0, id="of those that wait there"),
    ],
)
def test_the_broken_promises(changes: dict[str, object], here: float, there: float) -> None:
    stakes = replace(NOTHING, **changes)  # type: ignore[arg-type]
    assert stakes.broken_here(0.0, 1.0) == pytest.approx(here)
    assert stakes.broken_there(0.5, 0.5, 1.0) == pytest.approx(there)


@pytest.mark.parametrize(
    ("breaks", "streams", "better"),
    [
        (None, 1, "there"),
        ((0.0, 1.0), 1, "here"),
        ((1.0, 0.0), 0, "there"),
        ((MATTERS / 2, 0.0), 1, "there"),
        ((MATTERS / 2, 0.0), 0, "here"),
    ],
)
def test_costs_decide_where_promises_do_not(
    breaks: tuple[float, float] | None, streams: int, better: str
) -> None:
    """An idle engine computes itself, then."""
    assert Estimates(0.0, 1.0, streams, 0.0, 0.5, 0.1, 1.0, breaks=breaks).better == better


def kept(
    settings: DecodeSection,
    promised: Promised,
    prompt: int,
    slow: tuple[float, float],
    load: float,
    known: bool,
) -> float:
    """The share of requests within the promise, after the first, from which speeds are learned."""
    graph = VirtualGraph(settings, promised=promised if known else NO_PROMISE, slow=slow)
    at, rate = 0.0, load * (10 / slow[0] + 14 / slow[1]) * 1300 / prompt
    for _ in range(120):
        at += graph.random.expovariate(rate)
        graph.after(at, lambda: graph.ask(prompt))
    graph.run(at + 600)
    assert len(graph.done) == 120
    found = sorted(graph.done, key=lambda request: request.begun)[20:]
    inside = [each.ttft <= promised.ttft and each.longest_gap <= promised.gap for each in found]
    return sum(inside) / len(inside)


PROMISES = {
    "chat": (Promised(0.5, 0.06), 1300),
    "agent": (Promised(0.2, 0.1), 1300),
    "RAG": (Promised(2, 0.04), 3000),
}


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("load", [0.5, 1.0])
def test_no_way_alone_keeps_more_however_fast_the_workers_are(promise: str, load: float) -> None:
    """Decode and prefill workers ten times as fast, and ten times as slow."""
    knows = blind = 0.0
    promised, prompt = PROMISES[promise]
    for decode, prefill in product((0.1, 1.0, 10.0), repeat=2):
        args = promised, prompt, (decode, prefill), load
        both = [kept(settings, *args, known=False) for settings in (ALL_LOCAL, ALL_REMOTE)]
        share = kept(ADAPTIVE, *args, known=True)
        assert share >= max(both) - 0.12, (decode, prefill)
        knows, blind = knows + share, blind + kept(ADAPTIVE, *args, known=False)
    assert knows >= blind - 0.05


async def test_the_earliest_is_published_first(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream
) -> None:
    names = [
        await frontend.submit(LONG[number:], promise=Promise(ttft))
        for number, ttft in enumerate((25, 20, 15))
    ]
    await until(lambda: graph.depth == 3)
    pulled = []
    for _ in names:
        [delivery] = await acted.pull()
        pulled.append(delivery.request.request_id)
        await acted.start(pulled[-1])
    assert pulled == [names[0], names[2], names[1]]
