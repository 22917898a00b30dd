"""What is made of the probes of a candidate."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pdserve_bench.client import Exchange
from pdserve_bench.compare.candidates import Candidate, Launch
from pdserve_bench.compare.measuring import LEAST_REQUESTS, Entrant, Measuring, best_of, common_rate, noise
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.goodput.measure import Probe
from pdserve_bench.goodput.search import GoodputSearch
from pdserve_bench.progress import Schedule
from pdserve_bench.runs import LoadRun
from pdserve_bench.sections import Shape
from pdserve_bench.slo import Slo, Tally
from pdserve_bench.systems.system import PlainVllm, RunningSystem, Say, Stage, System

from tests.conditions import until


def entrant(name: str, aggregated: bool, **probes: int) -> Entrant:
    """`r2=18`: 18 of 20 requests kept the SLO at 2 requests/s."""
    launch = Launch(name, PlainVllm(name, Path(), name), 0.0)
    found = Entrant(Candidate(name, aggregated, Shape(0, 1), launch), GoodputSearch())
    for key, kept in probes.items():
        probe(found, float(key[1:]), kept)
    return found


def probe(found: Entrant, rate: float, kept: int, requests: int = 20, failed: int = 0) -> None:
    late = requests - kept - failed
    exchanges = [Exchange(started=0.0, ended=1.0, arrivals=[0.2, 0.9]) for _ in range(kept)]
    made = Probe(rate, 5.0, 1, LoadRun(exchanges, 0.0, 5.0), Tally(kept=kept, gap=late, failed=failed))
    found.probes.append(made)
    found.search.tell(rate, kept, requests)


def test_the_higher_goodput_is_the_best_of_its_kind() -> None:
    slow, fast = entrant("slow", True, r2=20, r4=5), entrant("fast", True, r2=20, r4=20, r8=3)
    other = entrant("other", False, r2=20, r4=20, r8=20)
    assert best_of([slow, fast, other], True) is fast
    assert best_of([slow, fast], False) is None


def test_of_equals_the_first_and_of_those_that_break_the_nearer_one() -> None:
    first, second = entrant("first", True, r2=20, r4=5), entrant("second", True, r2=20, r4=5)
    assert best_of([first, second], True) is first
    far, near = entrant("far", True, r2=2), entrant("near", True, r2=16)
    assert best_of([far, near], True) is near


def test_one_that_does_not_come_up_is_no_finalist() -> None:
    broken = entrant("broken", True, r2=20)
    broken.problem = "gone"
    assert best_of([broken], True) is None


def test_figures_are_of_the_highest_common_rate_that_one_of_them_carries() -> None:
    together, separate = entrant("a", True, r2=20, r4=5), entrant("d", False, r2=20, r4=20, r8=20)
    assert common_rate([together, separate]) == 4.0
    assert common_rate([entrant("a", True, r2=20, r4=5), entrant("d", False, r2=20, r4=5)]) == 2.0
    assert common_rate([entrant("a", True, r2=1), entrant("d", False, r2=1)]) == 2.0
    assert common_rate([entrant("a", True, r2=1), entrant("d", False, r4=1)]) is None


def test_failures_count_at_rates_that_are_carried() -> None:
    found = entrant("a", True, r2=20)
    probe(found, 4.0, 10, failed=10)
    assert found.result().failed == 0
    probe(found, 1.0, 19, failed=1)
    result = found.result(2.0)
    assert result.failed == 1
    assert (result.carried, result.broken) == (2.0, 4.0)
    assert result.broke == Tally(kept=10, failed=10)
    assert result.load is not None
    assert result.load.share == 1.0
    assert result.load.ttft == (0.2, 0.2)


def test_an_interval_rests_on_enough_requests() -> None:
    found = entrant("a", True, r2=20, r4=10)
    assert found.thin == 2.0
    assert found.result().thin == "20 requests at 2 requests/s"
    probe(found, 2.0, 20)
    assert (found.thin, found.result().requests) == (4.0, 40)
    probe(found, 4.0, 5)
    assert found.result().thin == ""


def test_one_probe_is_enough_at_a_rate_at_which_hardly_any_request_keeps_the_slo() -> None:
    found = entrant("a", True, r2=20, r4=0)
    probe(found, 2.0, 20)
    assert found.judged(4.0) < LEAST_REQUESTS
    assert found.thin is None


def test_noise_is_known_where_both_searches_came_near_the_border() -> None:
    near, again, wide = GoodputSearch(), GoodputSearch(), GoodputSearch()
    for search, low, high in ((near, 4.0, 4.4), (again, 3.6, 4.0), (wide, 2.0, 4.0)):
        search.tell(low, 100, 100)
        search.tell(high, 50, 100)
    known = noise(near, again)
    assert known is not None
    assert 0.05 < known < 0.15
    assert noise(near, wide) is None
    assert noise(near, GoodputSearch()) is None


class KnownCapacities(Measuring):
    """A probe finds what the candidate's name says: up to so many requests/s all keep the SLO, above it none does."""

    async def probe(
        self, entrant: Entrant, rate: float, seconds: float, search: GoodputSearch | None = None
    ) -> None:
        probe(entrant, rate, 20 if rate <= float(entrant.name) else 0)


@pytest.mark.parametrize("start", [1.0, 4.0, 16.0, 64.0])
async def test_the_best_of_each_kind_is_found_whatever_the_other_carries(
    tmp_path: Path, start: float
) -> None:
    measuring = KnownCapacities(Stage(tmp_path, print), Schedule(), Slo(), 0.9, 1)
    first = [entrant("3", True), entrant("33", False)]
    await measuring.screen(first, start, 1.0, time.monotonic() + 60)
    found = [*first, entrant("9", True)]
    await measuring.screen(found, start, 1.0, time.monotonic() + 60)
    best = best_of(found, True)
    assert best is not None
    assert best.name == "9"


async def test_finalists_are_probed_until_enough_requests_were_judged(tmp_path: Path) -> None:
    measuring = KnownCapacities(Stage(tmp_path, print), Schedule(), Slo(), 0.9, 1)
    found = entrant("3", True)
    found.search = GoodputSearch(2.0, precision=1.0)
    assert await measuring.refine([(found, found.search)], 1.0, time.monotonic() + 60)
    assert found.thin is None
    assert found.judged(found.search.carried or 0.0) >= LEAST_REQUESTS


@dataclass(frozen=True)
class Starting(System):
    """Is up after so many seconds."""

    name: str
    seconds: float
    log: list[str]

    @asynccontextmanager
    async def start(self, folder: Path, say: Say) -> AsyncIterator[RunningSystem]:
        try:
            await asyncio.sleep(self.seconds)
            self.log.append(f"+{self.name}")
            yield RunningSystem(Endpoint("", ""))
        finally:
            self.log.append(f"-{self.name}")


async def test_broken_off_it_stops_what_runs_and_what_starts(tmp_path: Path) -> None:
    log: list[str] = []
    launches = [Launch(name, Starting(name, seconds, log), 0.0) for name, seconds in (("a", 0), ("b", 60))]

    async def work() -> None:
        async with Stage(tmp_path, print) as stage:
            await Measuring(stage, Schedule(), Slo(), 0.9, 1).start(launches)

    task = asyncio.create_task(work())
    await until(lambda: log == ["+a"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(log) == ["+a", "-a", "-b"]
