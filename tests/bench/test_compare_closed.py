"""Closed loops: who is measured when, what is made of it, and which differences are more than noise."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from pdserve_bench.client import Exchange
from pdserve_bench.compare import closed
from pdserve_bench.compare.candidates import Candidate, Hardware, HardwareKind, Launch
from pdserve_bench.compare.closed import (
    ANSWER,
    REMOTE,
    TOKENS,
    ClosedLoops,
    ClosedOptions,
    Measured,
    alternate,
    tokens_between,
    window_figures,
)
from pdserve_bench.compare.closed_report import Figures, beyond, closed_report
from pdserve_bench.compare.comparison import maker_of
from pdserve_bench.compare.identity import judge
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.progress import Schedule
from pdserve_bench.sections import Shape
from pdserve_bench.simulated import simulated, write
from pdserve_bench.systems.system import RunningSystem, Say, Stage, System

from pdserve.errors import Unavailable
from tests.bench.answers import OpenAi, tiny_server
from tests.conditions import until
from tests.serving import processes_below

CPU = Hardware(HardwareKind.CPU, 2)


@pytest.mark.parametrize(
    ("systems", "loads", "rounds", "grouped", "expected"),
    [
        ("ABC", [1], 3, False, "A1 B1 C1 A1' A1' C1 B1 A1 A1 B1 C1 A1'"),
        ("AB", [1, 2], 2, False, "A1 B1 A1' A2 B2 A2' A2' B2 A2 A1' B1 A1"),
        ("AB", [1, 2], 2, True, "A1 A2 B1 B2 A1' A2' A2' A1' B2 B1 A2 A1"),
        ("A", [1], 1, False, "A1 A1'"),
    ],
)
def test_orders(systems: str, loads: list[int], rounds: int, grouped: bool, expected: str) -> None:
    turns = alternate(systems, loads, rounds, grouped=grouped)
    assert " ".join(f"{each.system}{each.clients}{chr(39) * each.again}" for each in turns) == expected
    assert len(set(turns)) == len(turns)


# ----- servers of known speed


@dataclass(frozen=True)
class Known(System):
    """Answers with a token every `gap` seconds."""

    name: str
    gap: float
    log: list[str]
    servers: dict[str, OpenAi]
    refuses: bool = False

    @asynccontextmanager
    async def start(self, folder: Path, say: Say) -> AsyncIterator[RunningSystem]:
        if not self.gap:
            raise Unavailable(f"{self.name} did not come up")
        server = self.servers[self.name] = OpenAi(ttft=self.gap, gap=self.gap)
        server.refused = frozenset({"prompt"} if self.refuses else ())
        async with tiny_server(server) as tiny:
            self.log.append(f"+{self.name}")
            yield RunningSystem(Endpoint(tiny.url, "tiny"))
        self.log.append(f"-{self.name}")


SERVERS: dict[str, OpenAi] = {}
"""that run or ran, by name"""


def known(name: str, gap: float, log: list[str], refuses: bool = False) -> Candidate:
    system = Known(name, gap, log, SERVERS, refuses)
    return Candidate(name, name != "graph", Shape(0, 1), Launch(name, system, 0.0))


def loops(
    first: Mapping[str, float],
    log: list[str],
    *,
    graph: float = 0.01,
    rounds: int = 1,
    here: Hardware = CPU,
    refuses: bool = False,
) -> ClosedLoops:
    options = ClosedOptions((2,), prompt_tokens=20, answer_len=10, rounds=rounds, seconds=0.3)
    singles = [known(name, gap, log) for name, gap in first.items()]
    return ClosedLoops(options, here, singles, [known("graph", graph, log, refuses)])


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed, "_WARM_UP", 0.05)


async def measure(found: ClosedLoops, folder: Path) -> None:
    async with Stage(folder, print) as stage:
        await found.measure(stage, Schedule())


async def test_the_baseline_is_the_best_of_the_settings_that_were_tried(tmp_path: Path) -> None:
    """A server that is 40 times slower is not the best on any machine."""
    log: list[str] = []
    found = loops({"slow": 0.2, "fast": 0.005, "slower": 0.3}, log)
    await measure(found, tmp_path)
    assert [each.name for each, _ in found.screened] == ["slow", "fast", "slower"]
    assert found.baseline is not None
    assert found.baseline.name == "fast"
    assert log == [
        "+slow",
        "-slow",
        "+fast",
        "-fast",
        "+slower",
        "-slower",
        "+fast",
        "+graph",
        "-graph",
        "-fast",
    ]
    assert [each.turn.system for each in found.measured] == ["fast", "graph", "fast"]
    report = closed_report(found, True)
    assert report.tables[0].best == 1
    same = found.same["graph"]
    assert (same.alone_equal, same.together_equal, same.failed) == (6, 6, 0)
    assert set(found.outcomes) == {"finished"}


async def test_a_single_setting_is_not_tried_first(tmp_path: Path) -> None:
    log: list[str] = []
    found = loops({"only": 0.005}, log, rounds=2)
    await measure(found, tmp_path)
    assert found.screened == []
    assert log == ["+only", "+graph", "-graph", "-only"]
    figures = Figures(found)
    assert figures.rounds(2) == 2
    graph = figures.compare("graph", 2, TOKENS)
    assert graph is not None
    assert len(graph.ratios) == 2
    assert graph.median <= 2 / 0.01, "no more than it can: a token every 10 ms to each of two clients"


async def test_on_gpus_there_are_never_two(tmp_path: Path) -> None:
    log: list[str] = []
    found = loops({"only": 0.005}, log, rounds=2, here=Hardware(HardwareKind.GPU, 2))
    await measure(found, tmp_path)
    assert log == ["+only", "-only", "+graph", "-graph"] * 2 + ["+only", "-only"]


async def test_running_systems_are_stopped_where_another_does_not_start(tmp_path: Path) -> None:
    log: list[str] = []
    with pytest.raises(Unavailable, match="graph did not come up"):
        await measure(loops({"only": 0.005}, log, graph=0.0), tmp_path)
    assert log == ["+only", "-only"]


async def test_broken_off_it_accounts_for_what_was_running(tmp_path: Path) -> None:
    log: list[str] = []
    found = loops({"only": 0.005}, log, rounds=2, graph=0.05)
    work = asyncio.create_task(measure(found, tmp_path))
    await until(lambda: len(found.measured) == 5 and SERVERS["graph"].running > 0, within=120)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert sorted(log) == ["+graph", "+only", "-graph", "-only"]
    last = found.measured[-1]
    assert not last.complete
    assert last.outcomes["unfinished"] > 0
    report = closed_report(found, complete=False)
    assert "1 at 2 clients" in report.tables[0].note
    assert len(report.data["turns"]) == 5
    assert report.as_json()


async def test_failures_are_reported(tmp_path: Path) -> None:
    found = loops({"only": 0.005}, [], refuses=True)
    await measure(found, tmp_path)
    assert found.same["graph"].failed == 12
    assert found.outcomes["failed"] > 12
    report = closed_report(found, True)
    assert "requests FAILED, so its load was another" in report.lead
    assert any("unknown field prompt" in note for note in report.notes)


async def test_each_setting_of_a_graph_is_in_force_when_it_is_measured(tmp_path: Path) -> None:
    """A graph of simulated engines, which is its own baseline here, so that one is started."""
    file = write(simulated({"step-seconds": 0.005, "prefill-rate": 20_000}), tmp_path / "graph.yaml")
    graph = maker_of(file).modes()
    baseline = replace(graph[0], name="baseline")
    options = ClosedOptions((2,), prompt_tokens=200, answer_len=4, rounds=1, seconds=0.5)
    found = ClosedLoops(options, Hardware(HardwareKind.SIM, 2), [baseline], graph)
    await measure(found, tmp_path)
    assert [each.turn.system for each in found.measured] == [
        "baseline",
        *(each.name for each in graph),
        "baseline",
    ]
    for each, remote in zip(found.measured, (0.0, 0.0, 1.0, None, 0.0), strict=True):
        assert remote in (None, each.figures.get(REMOTE, remote))
        assert set(each.outcomes) == {"finished"}
        parts = {"supervisor", "guardian", "nats-server", "etcd", "decode", "frontend", "prefill"}
        assert not each.cpu or each.cpu.keys() == parts
    for same in found.same.values():
        assert (same.alone_equal, same.together_equal, same.failed) == (6, 6, 0)
    assert processes_below(tmp_path) == []


# ----- known figures

PLAN = alternate(["base", "ours"], [1], 3, grouped=False)


def figures_of(values: Mapping[str, Sequence[float]], complete: int = 9) -> Figures:
    """`values`: tokens/s in each round, of `again` those of the baseline's second turns."""
    found = loops({"base": 1.0}, [])
    found.options, found.turns = ClosedOptions((1,)), PLAN
    for number, turn in enumerate(PLAN):
        name = "again" if turn.again else turn.system
        figures = {TOKENS: values[name][turn.round]}
        found.measured.append(Measured(turn, figures, complete=number < complete))
    return Figures(found)


def test_ratios_are_taken_round_by_round() -> None:
    """The machine was twice as fast in the second round: no ratio sees that."""
    figures = figures_of({"base": [90, 180, 99], "again": [110, 220, 101], "ours": [150, 300, 130]})
    ours, base = (figures.compare(name, 1, TOKENS) for name in ("ours", "base"))
    assert ours is not None
    assert base is not None
    assert ours.median == 150
    assert ours.ratios == pytest.approx([1.5, 1.5, 1.3])
    assert ours.ratio == pytest.approx(1.5)
    assert (base.median, base.ratio) == (100, None)
    assert figures.noise(1, TOKENS) == pytest.approx([110 / 90, 220 / 180, 101 / 99])
    assert ours.beyond_noise
    assert figures.compare("ours", 1, "goodput") is None


def test_only_complete_rounds_count() -> None:
    values = {"base": [100, 100, 1], "again": [100, 100, 1], "ours": [50, 60, 1]}
    found = figures_of(values, complete=8).compare("ours", 1, TOKENS)
    assert found is not None
    assert (found.median, len(found.ratios)) == (55, 2)
    assert figures_of(values, complete=2).loads == []


@pytest.mark.parametrize(
    ("ratios", "noise", "expected"),
    [
        ([1.5, 1.6, 1.4], [1.1, 0.9, 1.0], True),
        ([0.5, 0.6, 0.4], [1.1, 0.9, 1.0], True),
        ([1.05, 1.06, 1.04], [1.1, 0.9, 1.0], False),  # less than the baseline from itself
        ([0.95, 0.94, 0.96], [1.1, 1.0, 1.0], False),  # noise works both ways
        ([1.5, 1.6, 0.9], [1.01, 0.99, 1.0], False),  # not the same way in all rounds
        ([1.02, 1.03, 1.02], [1.0, 1.0, 1.01], True),
        ([2.0], [], False),  # the noise is not known
        ([1.2], [1.1], False),  # a single control run is no more than a hint of it
        ([5.0], [1.1], True),
        ([1.15, 1.2], [1.1, 0.95], False),
        ([1.3, 1.35], [1.1, 0.95], True),
        ([0.0, 0.0, 0.0], [1.0, 1.1, 0.9], False),
    ],
)
def test_a_ratio_beyond_the_noise(ratios: list[float], noise: list[float], expected: bool) -> None:
    assert beyond(ratios, noise) is expected


@pytest.mark.parametrize("rounds", [1, 2, 3, 6])
def test_equal_systems_seldom_seem_different(rounds: int) -> None:
    """Turns that vary by 10 %: noise is taken for a difference in about one case of twenty."""
    dice = Random(rounds)
    wrong, cases = 0, 2000
    for _ in range(cases):
        turns = [[dice.lognormvariate(0, 0.1) for _ in range(3)] for _ in range(rounds)]
        noise = [again / first for first, again, _ in turns]
        wrong += beyond([ours / ((first + again) / 2) for first, again, ours in turns], noise)
    assert 0.005 < wrong / cases < 0.08


def answered(
    started: float, *arrivals: float, tokens: int = 0, ended: float = 0.0, error: str = ""
) -> Exchange:
    return Exchange(
        started=started,
        arrivals=list(arrivals),
        completion_tokens=tokens,
        ended=ended or (arrivals[-1] if arrivals else started),
        error=error,
        prefill="remote" if started >= 15 else "local",
    )


EXCHANGES = [
    answered(9, 9.5, 10.5, 11.5, 12.5, tokens=8),  # began in the warm-up: 6 of its tokens came in the window
    answered(12, 12.1, 12.2, 13.2, tokens=3),
    answered(15, 15.3, 15.6, tokens=2),
    answered(19, 19.5, 21.5, tokens=2),  # was followed to its end, which is after the window
    answered(20, 20.1, 20.2, tokens=2),
    answered(14, 14.1, error="reset"),
    Exchange(started=19.5, arrivals=[19.75]),
]


def test_figures_of_a_window() -> None:
    figures = window_figures(EXCHANGES, 10.0, 20.0)
    assert figures[TOKENS] == pytest.approx((6 + 3 + 2 + 1 + 1 + 1) / 10)
    assert figures[ANSWER] == pytest.approx(7 / 3)
    assert figures["TTFT p50"] == pytest.approx(0.3)
    assert figures["TTFT p99"] == pytest.approx(0.5)
    assert figures["ITL p99"] == pytest.approx(2.0)
    assert figures["ITL p50"] == pytest.approx(0.3)  # 0.1, 1; 0.3; 2
    assert figures["longest gap p99"] == pytest.approx(2.0)
    assert figures[REMOTE] == pytest.approx(2 / 3)


def test_tokens_of_a_window_are_those_of_all_windows() -> None:
    """Split as you like: no token is lost or doubled."""
    whole = tokens_between(EXCHANGES, 0, 100)
    parts = sum(tokens_between(EXCHANGES, second, second + 1) for second in range(100))
    assert parts == pytest.approx(whole)
    assert whole == 8 + 3 + 2 + 2 + 2 + 1 + 1


def test_answers_are_compared_token_for_token() -> None:
    def said(text: str, *tokens: int, error: str = "") -> Exchange:
        return Exchange(text=text, tokens=list(tokens), error=error)

    alone = [said("ab", 1, 2), said("ab", 1, 3), said("ab", 1, 2), said("", error="reset")]
    together = [said("ab", 1, 2), said("z", 9)]
    expected = [said("ab", 1, 2)] * 5 + [said("", error="reset")]
    found = judge(alone, together, expected)
    assert (found.alone, found.alone_equal) == (3, 2)
    assert (found.together, found.together_equal, found.failed) == (1, 1, 2)
