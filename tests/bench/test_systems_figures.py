"""Medians, ratios, noise and CPU per token of known numbers."""

from collections.abc import Mapping, Sequence
from random import Random

import pytest
from pdserve_bench.client import Exchange
from pdserve_bench.systems.alternation import Turn, alternate
from pdserve_bench.systems.cpu import CpuReading
from pdserve_bench.systems.figures import Figures, beyond, cpu_by_process
from pdserve_bench.systems.identity import judge
from pdserve_bench.systems.loads import (
    ANSWER,
    CPU,
    TOKENS,
    Measurement,
    count_outcomes,
    tokens_between,
    window_figures,
)

PLAN = alternate(["base", "ours"], ["c=1"], 3)


def measured(values: Mapping[str, Sequence[float]], complete: int = 9) -> Figures:
    """`values`: tokens/s in each round, of `again` those of the baseline's second turns."""
    found = []
    for turn in PLAN[:complete]:
        name = "again" if turn.control else turn.system
        found.append(Measurement(turn, {TOKENS: values[name][turn.round]}, {}))
    return Figures(PLAN, found, "base")


def test_ratios_are_taken_round_by_round() -> None:
    """The machine was twice as fast in the second round: no ratio sees that."""
    figures = measured({"base": [90, 180, 99], "again": [110, 220, 101], "ours": [150, 300, 130]})
    ours = figures.compare("ours", "c=1", TOKENS)
    base = figures.compare("base", "c=1", TOKENS)
    assert ours is not None
    assert base is not None
    assert ours.median == 150
    assert ours.ratios == pytest.approx([1.5, 1.5, 1.3])
    assert ours.ratio == pytest.approx(1.5)
    assert (base.median, base.ratio) == (100, None)
    assert figures.noise("c=1", TOKENS) == pytest.approx([110 / 90, 220 / 180, 101 / 99])
    assert ours.beyond_noise


def test_only_complete_rounds_count() -> None:
    values = {"base": [100, 100, 1], "again": [100, 100, 1], "ours": [50, 60, 1]}
    found = measured(values, complete=8).compare("ours", "c=1", TOKENS)
    assert found is not None
    assert (found.median, len(found.ratios)) == (55, 2)
    assert measured(values, complete=2).compare("ours", "c=1", TOKENS) is None


def test_a_turn_that_was_broken_off_is_not_measured() -> None:
    found = [Measurement(turn, {TOKENS: 1.0}, {}, complete=turn.round > 0) for turn in PLAN]
    assert Figures(PLAN, found, "base").rounds == {"c=1": [1, 2]}


def test_a_figure_that_is_not_known_is_none() -> None:
    figures = measured({"base": [1, 1, 1], "again": [1, 1, 1], "ours": [1, 1, 1]})
    assert figures.compare("ours", "c=1", "goodput") is None
    assert figures.compare("ours", "c=1", CPU) is None
    assert figures.noise("c=1", "goodput") == []


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
def test_what_is_beyond_the_noise(ratios: list[float], noise: list[float], expected: bool) -> None:
    assert beyond(ratios, noise) is expected


@pytest.mark.parametrize("rounds", [1, 2, 3, 6])
def test_equal_systems_are_seldom_told_apart(rounds: int) -> None:
    """Turns that vary by 10 %: noise is taken for a difference in about one case of twenty."""
    dice = Random(rounds)
    wrong, cases = 0, 2000
    for _ in range(cases):
        turns = [[dice.lognormvariate(0, 0.1) for _ in range(3)] for _ in range(rounds)]
        noise = [again / first for first, again, _ in turns]
        wrong += beyond([ours / ((first + again) / 2) for first, again, ours in turns], noise)
    assert 0.005 < wrong / cases < 0.08


def test_cpu_seconds_for_1000_tokens() -> None:
    turn = Turn(0, "ours", "c=1")
    found = [
        Measurement(turn, {}, {}, CpuReading({"decode": 1.0, "etcd": 0.1}), tokens=500, generator=0.05),
        Measurement(turn, {}, {}, CpuReading({"decode": 3.0, "etcd": 0.1}), tokens=1000, generator=0.3),
        Measurement(turn, {}, {}, CpuReading({"decode": 9.0}), tokens=1000, generator=0.2),
        Measurement(turn, {}, {}, CpuReading({"decode": 9.0}), tokens=0, generator=0.2),
    ]
    assert cpu_by_process(found) == pytest.approx(
        {"decode": 3.0, "etcd": 0.1, "all": 3.1, "load generator": 0.2}
    )
    assert list(cpu_by_process(found))[-2:] == ["all", "load generator"]


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
    assert figures["requests/s"] == pytest.approx(3 / 10)
    assert figures[ANSWER] == pytest.approx(7 / 3)
    assert figures["TTFT p50"] == pytest.approx(0.3)
    assert figures["TTFT p99"] == pytest.approx(0.5)
    assert figures["ITL p99"] == pytest.approx(1.0)
    assert figures["ITL p50"] == pytest.approx(1.0)  # 1, 1, 1 of the first; 0.1, 1; 0.3
    assert figures["longest gap p99"] == pytest.approx(2.0)
    assert figures["remote prefills"] == pytest.approx(2 / 3)


def test_tokens_of_a_window_are_those_of_all_windows() -> None:
    """Split as you like: no token is lost or doubled."""
    whole = tokens_between(EXCHANGES, 0, 100)
    parts = sum(tokens_between(EXCHANGES, second, second + 1) for second in range(100))
    assert parts == pytest.approx(whole)
    assert whole == 8 + 3 + 2 + 2 + 2 + 1 + 1


def test_each_request_is_counted_once() -> None:
    assert count_outcomes(EXCHANGES) == {"finished": 5, "failed": 1, "unfinished": 1}


def test_answers_are_compared_token_for_token() -> None:
    def said(text: str, *tokens: int, error: str = "") -> Exchange:
        return Exchange(text=text, tokens=list(tokens), error=error)

    alone = [said("ab", 1, 2), said("ab", 1, 3), said("ab", 1, 2), said("", error="reset")]
    together = [said("ab", 1, 2), said("z", 9)]
    expected = [said("ab", 1, 2)] * 5 + [said("", error="reset")]
    found = judge(alone, together, expected)
    assert (found.alone, found.alone_equal) == (3, 2)
    assert (found.together, found.together_equal, found.failed) == (1, 1, 2)
