"""The expected number of SLO misses, and how many promises are kept by decisions that use it, in virtual time."""

import math
from dataclasses import replace
from itertools import product
from random import Random
from statistics import median

import pytest

from pdserve.config.schema import DecodeSection
from pdserve.contract.messages import Promise
from pdserve.contract.slo import MIN_MISS_DIFFERENCE, gap_miss_probability, ttft_miss_probability
from pdserve.decode.policy.cost import Estimates
from pdserve.decode.policy.slo_risk import SloRisk
from tests.conditions import until
from tests.decode.graph import LONG, ActedPrefill, FrontendStream, WorkerGraph
from tests.decode.virtual import ADAPTIVE, ALL_LOCAL, ALL_REMOTE, NO_PROMISE, Promised, VirtualGraph

INF = math.inf
NO_RISK = SloRisk(left=INF, gap=INF, plain=0.01, step=0.05)


@pytest.mark.parametrize(("seconds", "left"), [(1.0, 0.0), (1.0, -1.0), (1.0, 0.5)])
def test_a_token_that_cannot_come_in_time_misses_its_deadline(seconds: float, left: float) -> None:
    assert ttft_miss_probability(seconds, left) == 1.0


def test_without_an_slo_none_is_missed() -> None:
    assert ttft_miss_probability(1e9, INF) == gap_miss_probability(1e9, INF) == 0.0
    assert NO_RISK.local_misses(9.0, 9.0) == NO_RISK.remote_misses(9.0) == 0.0


@pytest.mark.parametrize(
    ("changes", "local", "remote"),
    [
        pytest.param({"left": 1.0}, 0.5, 0.5, id="first token of the prompt"),
        pytest.param({"gaps": [0.05, 0.05, 0.2]}, 2.0, 0.0, id="gaps of streams"),
        pytest.param({"gap": 0.01}, 1.0, 1.0, id="steps are too long in any case"),
    ],
)
def test_expected_slo_misses(changes: dict[str, object], local: float, remote: float) -> None:
    risk = replace(NO_RISK, **changes)  # type: ignore[arg-type]
    assert risk.local_misses(0.0, 1.0) == pytest.approx(local)
    assert risk.remote_misses(1.0) == pytest.approx(remote)


@pytest.mark.parametrize(
    ("slo_misses", "streams", "better"),
    [
        pytest.param((0.0, 1.0), 1, "remote", id="remote misses one more but costs under half"),
        pytest.param((0.0, 2.5), 1, "local", id="remote misses 2.5 more"),
        pytest.param((1.0, 0.0), 0, "remote", id="local misses one more"),
        pytest.param((MIN_MISS_DIFFERENCE / 2, 0.0), 1, "remote", id="about equal: remote is cheaper"),
    ],
)
def test_slo_misses_are_weighed_against_costs(
    slo_misses: tuple[float, float], streams: int, better: str
) -> None:
    assert Estimates(0.0, 1.0, streams, 0.0, 0.5, 0.1, 1.0, slo_misses=slo_misses).better == better


def run(
    settings: DecodeSection,
    promised: Promised,
    prompt: int,
    slow: tuple[float, float],
    rate: float,
    known: bool,
) -> tuple[float, float]:
    """Return the share of requests within the promise and the median of the seconds to the last token, without the
    first 20 requests, in which the workers learn speeds."""
    graph = VirtualGraph(settings, promised=promised if known else NO_PROMISE, slow=slow)
    at, arrivals = 0.0, Random(1)
    for _ in range(120):
        at += arrivals.expovariate(rate)
        graph.after(at, lambda: graph.ask(prompt))
    graph.run(at + 600)
    assert len(graph.done) == 120
    found = sorted(graph.done, key=lambda request: request.begun)[20:]
    finish = median(each.times[-1] - each.begun for each in found)
    return sum(each.keeps(promised) for each in found) / len(found), finish


PROMISES = {
    "chat": (Promised(0.5, 0.06), 1300),
    "agent": (Promised(0.2, 0.1), 1300),
    "RAG": (Promised(2, 0.04), 3000),
}


@pytest.mark.parametrize(("promise", "load"), [("chat", 0.5), ("chat", 1.0), ("agent", 1.0), ("RAG", 0.5)])
def test_adaptive_keeps_about_as_many_promises_as_the_better_way(promise: str, load: float) -> None:
    knows = blind = 0.0
    promised, prompt = PROMISES[promise]
    for decode, prefill in product((0.1, 1.0, 10.0), repeat=2):
        rate = load * (10 / decode + 14 / prefill) * 1300 / prompt
        args = promised, prompt, (decode, prefill), rate
        both = [run(settings, *args, known=False)[0] for settings in (ALL_LOCAL, ALL_REMOTE)]
        share, _ = run(ADAPTIVE, *args, known=True)
        assert share >= max(both) - 0.12, (decode, prefill)
        knows, blind = knows + share, blind + run(ADAPTIVE, *args, known=False)[0]
    assert knows >= blind - 0.05


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize(
    ("slow", "rate"),
    [((1, 1), 5), ((1, 1), 20), ((1, 0.1), 20), ((10, 0.1), 2), ((10, 1), 2), ((1, 10), 4), ((1, 10), 10)],
)
def test_a_promise_does_not_delay_the_end_of_answers(
    promise: str, slow: tuple[float, float], rate: float
) -> None:
    promised, prompt = PROMISES[promise]
    args = ADAPTIVE, promised, prompt, slow, rate * 1300 / prompt
    (blind, without), (knows, finish) = (run(*args, known=known) for known in (False, True))
    assert finish <= 1.05 * without
    assert knows >= blind - 0.01


async def test_a_late_request_is_published_last(
    graph: WorkerGraph, acted: ActedPrefill, frontend: FrontendStream
) -> None:
    names = [
        await frontend.submit(LONG[number:], promise=Promise(ttft))
        for number, ttft in enumerate((25, 0.001, 15))
    ]
    await until(lambda: graph.depth == 3)
    pulled = []
    for _ in names:
        [delivery] = await acted.pull()
        pulled.append(delivery.request.request_id)
        await acted.start(pulled[-1])
    assert pulled == [names[0], names[2], names[1]]
