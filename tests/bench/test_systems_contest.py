"""A contest between tiny servers of known speed: who is started when, what is found, what is left."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.progress import Schedule
from pdserve_bench.systems.aggregated import Baseline, Layout
from pdserve_bench.systems.alternation import alternate
from pdserve_bench.systems.contest import Contest, Contestant, Record
from pdserve_bench.systems.figures import Figures
from pdserve_bench.systems.loads import TOKENS, ClosedLoad
from pdserve_bench.systems.render import make_report
from pdserve_bench.systems.system import RunningSystem, Say, Stage, System

from pdserve.config.load import load
from pdserve.errors import Unavailable
from pdserve.plan.machine import Machine
from pdserve.plan.plan import Plan, make_plan
from tests.bench.answers import OpenAi, tiny_server
from tests.conditions import until

PLAN = make_plan(
    load(Path(__file__).parent.parent.parent / "configs/local.yaml", {}),
    Machine((), cores=2, memory=64 << 30, available=60 << 30, build="cpu"),
    env={},
)
WARM_UP, WINDOW, TOKENS_OUT = 0.1, 0.4, 10


@dataclass
class Known(System):
    """Its first token after `gap` seconds, then one every `gap`."""

    name: str
    gap: float
    log: list[str]
    broken: bool = False
    server: OpenAi = field(init=False)

    @asynccontextmanager
    async def start(self, folder: Path, say: Say) -> AsyncIterator[RunningSystem]:
        if self.broken:
            raise Unavailable(f"{self.name} did not come up")
        self.server = OpenAi(ttft=self.gap, gap=self.gap)
        async with tiny_server(self.server) as tiny:
            self.log.append(f"+{self.name}")
            yield RunningSystem(Endpoint(tiny.url, "tiny"))
        self.log.append(f"-{self.name}")


@dataclass(frozen=True)
class KnownBaseline(Baseline):
    gap: float = 0.01
    log: list[str] = field(default_factory=list)

    def system(self, name: str) -> System:
        """Half as fast with the batch of 7."""
        return Known(name, self.gap * (2 if self.batch == 7 else 1), self.log)


@dataclass
class Case:
    contest: Contest
    log: list[str]

    @property
    def record(self) -> Record:
        return self.contest.record

    @property
    def plan(self) -> Plan:
        return self.contest.plan


def case(
    folder: Path,
    *others: Known,
    gaps: Sequence[float] = (0.005,),
    rounds: int = 2,
    batches: Sequence[int] = (),
    in_turn: bool = False,
    log: "list[str] | None" = None,
) -> Case:
    log = [] if log is None else log
    contestants = [Contestant(name, name, "tiny") for name in ("base", *(other.name for other in others))]
    loads = [ClosedLoad(2, 20, TOKENS_OUT, WARM_UP, WINDOW)]
    turns = alternate([each.name for each in contestants], ["c=2"], rounds, grouped=in_turn)
    baselines = [
        KnownBaseline(PLAN, Layout(threads=place), 7, "", gap, log) for place, gap in enumerate(gaps)
    ]
    record = Record(contestants, loads, turns, baselines, batches, in_turn)
    schedule = Schedule()
    systems: dict[str, System] = {other.name: other for other in others}
    contest = Contest(PLAN, record, Stage(folder, print), schedule, systems, loads, seed=1, start_seconds=0.1)
    contest.announce()
    return Case(contest, log)


async def test_a_system_of_known_speed(tmp_path: Path) -> None:
    log: list[str] = []
    found = case(tmp_path, Known("slow", 0.025, log), log=log)
    await found.contest.run()
    figures = Figures(found.record.plan, found.record.measurements, "base")
    slow = figures.compare("slow", "c=2", TOKENS)
    ttft = figures.compare("slow", "c=2", "TTFT p50")
    gap = figures.compare("slow", "c=2", "longest gap p99")
    assert slow is not None
    assert len(slow.ratios) == 2
    assert slow.median < 2 / 0.025
    assert ttft is not None
    assert ttft.median >= 0.025
    assert gap is not None
    assert gap.median >= 0.025
    assert len(found.record.measurements) == 2 * 3
    assert log == ["+base", "+slow", "-slow", "-base"]
    same = found.record.same["slow"]
    assert (same.alone_equal, same.together_equal, same.failed) == (6, 6, 0)
    outcomes = found.record.outcomes
    assert (outcomes["failed"], outcomes["unfinished"]) == (0, 0)
    assert found.contest.schedule.seconds_left == 0, "each phase that was announced was gone through"


async def test_the_best_of_the_settings_that_were_tried_takes_part(tmp_path: Path) -> None:
    """First the ways to run it, then the best of them with the other batches."""
    found = case(tmp_path, gaps=(0.02, 0.005, 0.02), batches=(6, 7), rounds=1)
    await found.contest.run()
    best = found.record.baseline
    assert best is not None
    assert (best.layout.threads, best.batch) == (1, 6)
    tried = [(each.baseline.layout.threads, each.baseline.batch) for each in found.record.screened]
    assert tried == [(0, 7), (1, 7), (2, 7), (1, 6)]
    assert found.log == ["+base", "-base"] * 4, "the last that was tried was the best: it went on running"
    assert found.contest.schedule.seconds_left == 0
    table = make_report(found.record, found.plan, True).tables[0]
    assert (table.best, len(table.rows)) == (3, 4)


async def test_in_turn_there_are_never_two(tmp_path: Path) -> None:
    """And the best setting is started again where it was not the last that was tried."""
    log: list[str] = []
    other = Known("other", 0.005, log)
    found = case(tmp_path, other, gaps=(0.005, 0.02), batches=(7,), in_turn=True, log=log)
    await found.contest.run()
    assert found.record.baseline is not None
    assert found.record.baseline.layout.threads == 0
    rounds = ["+base", "-base", "+other", "-other"] * 2 + ["+base", "-base"]
    assert log == ["+base", "-base"] * 2 + rounds
    assert found.contest.schedule.seconds_left == 0


async def test_what_runs_is_stopped_where_another_does_not_start(tmp_path: Path) -> None:
    log: list[str] = []
    found = case(tmp_path, Known("broken", 0.01, log, broken=True), log=log)
    with pytest.raises(Unavailable, match="broken did not come up"):
        await found.contest.run()
    assert log == ["+base", "-base"]


async def test_a_contest_that_is_broken_off_accounts_for_what_was_running(tmp_path: Path) -> None:
    """In the second turn of the second round."""
    log: list[str] = []
    found = case(tmp_path, Known("other", 0.01, log), log=log)
    work = asyncio.create_task(found.contest.run())
    await until(lambda: len(found.record.measurements) == 4, within=60)
    await asyncio.sleep(0.15)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert sorted(log) == ["+base", "+other", "-base", "-other"]
    last = found.record.measurements[-1]
    assert not last.complete
    assert last.outcomes["unfinished"] == 2
    assert Figures(found.record.plan, found.record.measurements, "base").rounds == {"c=2": [0]}
    report = make_report(found.record, found.plan, complete=False)
    assert "Medians of 1 round." in report.tables[0].note
    assert len(report.data["turns"]) == 5
    assert report.as_json()


async def test_failures_and_other_answers_are_told(tmp_path: Path) -> None:
    class Wrong(OpenAi):
        """Answers some requests with an error."""

        async def __call__(self, asked: object, writer: asyncio.StreamWriter) -> None:
            self.refused = frozenset({"prompt"} if len(self.chats) % 3 == 2 else ())
            self.chats += [] if not self.refused else [asked]  # type: ignore[list-item]
            await super().__call__(asked, writer)  # type: ignore[arg-type]

    class Other(Known):
        @asynccontextmanager
        async def start(self, folder: Path, say: Say) -> AsyncIterator[RunningSystem]:
            async with tiny_server(Wrong(gap=0.005)) as tiny:
                yield RunningSystem(Endpoint(tiny.url, "tiny"))

    found = case(tmp_path, Other("other", 0.01, []), rounds=1)
    await found.contest.run()
    assert found.record.same["other"].failed == 4
    assert found.record.outcomes["failed"] > 4
    report = make_report(found.record, found.plan, True)
    failed = {str(row[0]): row[-1] for row in report.tables[0].rows}
    assert report.tables[0].columns[-1].name == "FAILED"
    assert failed["base"] == 0
    assert failed["other"]
    assert any("unknown field prompt" in note for note in report.notes)
