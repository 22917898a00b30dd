"""A candidate's result follows from its probes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pdserve_bench.client import Exchange
from pdserve_bench.compare import comparison, measuring
from pdserve_bench.compare.candidates import Candidate, CandidateMaker, Hardware, HardwareKind
from pdserve_bench.compare.command import _single
from pdserve_bench.compare.comparison import Comparison
from pdserve_bench.compare.measuring import LEAST_REQUESTS, CompareOptions, Entrant, best_of, noise
from pdserve_bench.compare.recommend import Criteria, Verdict, recommend
from pdserve_bench.compare.systems import PlainVllm
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.goodput.measure import GoodputOptions, Probe
from pdserve_bench.goodput.result import GoodputResult
from pdserve_bench.graphs.sections import Shape
from pdserve_bench.graphs.simulated import simulated, write
from pdserve_bench.measure.runs import LoadRun
from pdserve_bench.measure.slo import Slo, Tally

from pdserve.config.load import load
from pdserve.util.errors import Unavailable
from tests.bench.answers import OpenAi, tiny_server
from tests.bench.compare.test_candidates import CPU
from tests.conditions import until


def unknown() -> GoodputResult:
    return GoodputResult(GoodputOptions(start_rate=1.0, least=LEAST_REQUESTS, warm_up=False))


def entrant(name: str, aggregated: bool, **probes: int) -> Entrant:
    """`r2=18`: 18 of 20 requests kept the SLO at 2 requests/s."""
    found = Entrant(Candidate(name, aggregated, Shape(0, 1), PlainVllm(Path(), name)), unknown())
    for key, kept in probes.items():
        probe(found, float(key[1:]), kept)
    return found


def probe(found: Entrant, rate: float, kept: int, failed: int = 0) -> None:
    exchanges = [Exchange(started=0.0, ended=1.0, arrivals=[0.2, 0.9]) for _ in range(kept)]
    tally = Tally(kept=kept, gap=20 - kept - failed, failed=failed)
    found.found.probes.append(Probe(rate, 5.0, 1, LoadRun(exchanges, 0.0, 5.0), tally, counted=True))
    found.found.search.tell(rate, kept, 20)


def test_the_best_has_the_highest_goodput_or_comes_nearest() -> None:
    """Of equals, the first is the best. If none carries a rate, the share kept at the lowest rate decides."""
    slow, fast = entrant("slow", True, r2=20, r4=5), entrant("fast", True, r2=20, r4=20, r8=3)
    same, other = entrant("same", True, r2=20, r4=20, r8=3), entrant("other", False, r2=20, r4=20, r8=20)
    assert best_of([slow, fast, same, other], True) is fast
    assert best_of([slow, fast], False) is None
    far, near = entrant("far", True, r2=2), entrant("near", True, r2=16)
    assert best_of([far, near], True) is near
    near.problem = "crashed"
    assert best_of([far, near], True) is far


def test_latencies_are_of_the_requested_or_the_carried_rate() -> None:
    found = entrant("a", True, r2=20, r4=5)
    assert [load and load.rate for load in (found.result().load, found.result(4.0).load)] == [2.0, 4.0]
    assert found.result(9.0).load is None
    lowest = entrant("a", True, r2=1).result().load
    assert lowest is not None
    assert lowest.rate == 2.0


def test_only_failures_up_to_the_carried_rate_count() -> None:
    found = entrant("a", True, r2=20)
    probe(found, 4.0, 10, failed=10)
    assert found.result().failed == 0
    probe(found, 1.0, 19, failed=1)
    result = found.result(2.0)
    assert result.failed == 1
    assert (result.carried, result.broken) == (2.0, 4.0)
    assert result.broke == Tally(kept=10, failed=10)
    assert result.load is not None
    assert (result.load.share, result.load.ttft) == (1.0, (0.2, 0.2))


@pytest.mark.parametrize(
    ("probes", "rate", "said"),
    [
        ([(2, 20), (4, 10)], 2.0, "20 requests at 2 requests/s"),
        ([(2, 20), (2, 20), (4, 10)], 4.0, "20 requests at 4 requests/s"),
        ([(2, 20), (2, 20), (4, 10), (4, 5)], None, ""),
        ([(2, 20), (2, 20), (4, 0)], None, ""),  # hardly any request keeps the SLO: one probe is enough
    ],
)
def test_a_rate_with_too_few_requests_is_named(
    probes: list[tuple[float, int]], rate: float | None, said: str
) -> None:
    found = entrant("a", True)
    for probed, kept in probes:
        probe(found, probed, kept)
    assert (found.found.thin, found.result().thin) == (rate, said)


def test_noise_is_known_only_if_the_repeated_search_is_precise() -> None:
    near, again, wide = unknown(), unknown(), unknown()
    for found, low, high in ((near, 4.0, 4.4), (again, 3.6, 4.0), (wide, 2.0, 4.0)):
        found.search.tell(low, 100, 100)
        found.search.tell(high, 50, 100)
    known = noise(near, again)
    assert known is not None
    assert 0.05 < known < 0.15
    assert noise(near, wide) is None
    assert noise(near, unknown()) is None


def test_a_graph_no_better_than_the_repeated_baseline_gains_nothing() -> None:
    """A graph that carries more than both baselines, by more than the noise, does gain."""
    baseline, control, same = (
        entrant(name, name == "a", r1=20, **rates)
        for name, rates in (
            ("a", {"r4": 20, "r5": 2}),
            ("again", {"r6": 20, "r7": 2}),
            ("d", {"r6": 20, "r7": 2}),
        )
    )
    known = noise(baseline.found, control.found)
    assert known == pytest.approx(control.rank()[0] / baseline.rank()[0] - 1)
    baseline.again = control.found.search.carried, control.found.search.broken
    more = entrant("d", False, r1=20, r8=20, r9=2)
    for graph, verdict in ((same, Verdict.SAME), (more, Verdict.DISAGGREGATE)):
        findings = [replace(each.result(), thin="") for each in (baseline, graph)]
        assert recommend(findings, Criteria(noise=known)).verdict is verdict
        assert (findings[0].carried, findings[0].broken) == (4.0, 7.0)


@dataclass(frozen=True)
class Served:
    """A server with a token every `gap` seconds. With `gap` 0 it does not start."""

    name: str
    gap: float
    log: list[str]

    @asynccontextmanager
    async def start(self, folder: Path) -> AsyncIterator[Endpoint]:
        if not self.gap:
            raise Unavailable(f"{self.name} did not come up")
        async with tiny_server(OpenAi(ttft=self.gap, gap=self.gap)) as tiny:
            self.log.append(f"+{self.name}")
            yield Endpoint(tiny.url, "tiny")
        self.log.append(f"-{self.name}")


@dataclass(frozen=True)
class KnownMaker(CandidateMaker):
    """Makes the candidates in `made`."""

    made: Sequence[Candidate] = ()

    def aggregated(self) -> list[Candidate]:
        return [each for each in self.made if each.aggregated]

    def disaggregated(self) -> list[Candidate]:
        return [each for each in self.made if not each.aggregated]


def compared(folder: Path, log: list[str], minutes: float, **gaps: float) -> Comparison:
    """`a1=0.01`: an aggregated candidate whose responses have 5 tokens, 10 ms apart. The SLO's bounds are 100 ms."""
    config = load(write(simulated(), folder / "graph.yaml"), {})
    made = [
        Candidate(name, name[0] == "a", Shape(0, 1), Served(name, gap, log)) for name, gap in gaps.items()
    ]
    maker = KnownMaker(config, {}, Hardware(HardwareKind.SIM, 2), CPU, None, made)
    options = CompareOptions(config.path, Slo(0.1, 0.1), rate=40.0, minutes=minutes)
    return Comparison(options, _single(20, 5, 1), config, maker.here, maker)


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_STOP", 0.0)
    for name, seconds in (("_LEAST", 0.3), ("_MOST", 0.3)):
        monkeypatch.setattr(measuring, name, seconds)


async def test_each_candidate_is_tried_and_the_best_of_each_kind_measured_further(tmp_path: Path) -> None:
    log: list[str] = []
    found = compared(tmp_path, log, 0.2, a1=0.3, d1=0.01)
    await found.run()
    assert log == ["+a1", "-a1", "+d1", "-d1", "+a1", "-a1"], "one at a time; d1, still up, goes on first"
    assert [each.name for each in found.finalists] == ["a1", "d1"]
    first, second = found.results()
    assert first.carried is None
    assert second.sound
    assert found.recommendation().verdict in (Verdict.DISAGGREGATE, Verdict.UNKNOWN)


async def test_candidates_that_failed_or_had_no_time_are_named(tmp_path: Path) -> None:
    log: list[str] = []
    found = compared(tmp_path, log, 0.01, a1=0.01, a2=0.01, d1=0.0, d2=0.01)
    await found.run()
    assert {name for name in log if name[0] == "+"} == {"+a1"}
    assert [each.problem for each in found.results()] == ["", "d1 did not come up"]
    assert found.notes == ["Skipped for lack of time: a2; d2. Give --minutes more."]
    with pytest.raises(Unavailable, match="No candidate started: a1 did not"):
        await compared(tmp_path, log, 0.02, a1=0.0, d1=0.0).run()


async def test_an_interrupted_comparison_stops_the_running_candidate(tmp_path: Path) -> None:
    log: list[str] = []
    task = asyncio.create_task(compared(tmp_path, log, 0.15, a1=0.01, d1=0.01).run())
    await until(lambda: len(log) == 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["+a1", "-a1", "+d1", "-d1"]
