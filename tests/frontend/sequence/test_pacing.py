"""When the outputs of a stream leave: the policy in virtual time."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from pdserve.contract.slo import SloTargets
from pdserve.frontend.sequence.pacing import DEADLINE_MARGIN, MAX_EARLY, MAX_HELD, MAX_HOLD, Reserve

CHAT, AGENT, RAG = SloTargets(0.5, 0.06), SloTargets(0.2, 0.1), SloTargets(2.0, 0.04)
STARTED = 1000.0
PREFILL = 0.1
"""seconds from a request to its first output"""


def left(
    promised: SloTargets, arrivals: Sequence[float], deadline: float = math.inf, started: float = STARTED
) -> list[float]:
    """Return when each output leaves, for these arrival times. The last output ends the response."""
    reserve = Reserve[int].of(promised, started, deadline)
    assert reserve is not None
    leaves, times = list[int](), list[float]()
    for number, arrival in enumerate(arrivals):
        while reserve.due < arrival:
            now = reserve.due
            new = reserve.pop_due(now)
            assert new, "due, and nothing leaves"
            leaves, times = leaves + new, times + [now] * len(new)
        last = number == len(arrivals) - 1
        new = [*reserve.flush(), number] if last else reserve.add(number, arrival)
        assert len(reserve) <= MAX_HELD
        leaves, times = leaves + new, times + [arrival] * len(new)
    assert leaves == list(range(len(arrivals))), "lost, or out of order"
    return times


def come(interval: float, outputs: int = 64, delays: dict[int, float] | None = None) -> list[float]:
    """Return arrival times: an output each `interval` seconds. `delays`: output number -> seconds added before it."""
    steps = [PREFILL] + [interval + (delays or {}).get(number, 0.0) for number in range(1, outputs)]
    return [STARTED + passed for passed in itertools.accumulate(steps)]


def longest(times: Sequence[float]) -> float:
    return max(after - before for before, after in itertools.pairwise(times))


@pytest.mark.parametrize(("promised", "delay"), [(CHAT, 0.4), (AGENT, 0.6), (RAG, 0.25)])
@pytest.mark.parametrize("speed", [0.1, 0.3, 1.0, 3.0, 10.0])
def test_a_reserve_of_tokens_keeps_gaps_short_in_a_delay(
    promised: SloTargets, delay: float, speed: float
) -> None:
    """`speed` 1 is the demo model's: 10 ms per token. Only streams twice as fast as promised surely have a reserve."""
    assert promised.gap is not None
    interval = 0.01 / speed
    arrivals = come(interval, 128, {100: delay})
    paced = left(promised, arrivals)
    assert longest(arrivals) > promised.gap
    if 2 * interval < promised.gap:
        assert longest(paced) <= promised.gap
    assert longest(paced) <= longest(arrivals)
    assert paced[-1] == arrivals[-1]


@pytest.mark.parametrize("promised", [CHAT, AGENT, RAG, SloTargets(gap=0.06)])
@pytest.mark.parametrize("seed", range(40))
def test_pacing_never_delays_the_end_and_makes_no_gap_above_the_pace(promised: SloTargets, seed: int) -> None:
    assert promised.gap is not None
    chance = random.Random(seed)
    interval = 10 ** chance.uniform(-3, -1)
    delays = {number: chance.expovariate(5) for number in range(1, 100) if chance.random() < 0.1}
    arrivals = come(interval, 100, delays)
    paced = left(promised, arrivals)
    assert paced[-1] == arrivals[-1]
    assert all(after >= before for before, after in zip(arrivals, paced, strict=True))
    assert longest(paced) <= max(longest(arrivals), promised.gap * 2 / 3) + 1e-9
    first = STARTED + (promised.ttft or PREFILL + MAX_HOLD)
    assert paced[0] <= max(first, arrivals[0]) + 1e-9


@pytest.mark.parametrize("interval", [0.001, 0.01, 0.03])
def test_held_outputs_are_bounded(interval: float) -> None:
    """At most `MAX_HELD` outputs are held (see `left`), and none longer than `MAX_HOLD` plus one interval."""
    arrivals = come(interval, 500)
    held = [after - before for before, after in zip(arrivals, left(CHAT, arrivals), strict=True)]
    assert max(held) <= MAX_HOLD + interval
    assert max(held[100:]) > 5 * interval, "there is a reserve"


def test_an_answer_slower_than_the_pace_is_soon_not_held() -> None:
    arrivals = come(0.045)
    paced = left(CHAT, arrivals)
    assert paced[0] == arrivals[1], "the first waits, so that the second is not late"
    assert sum(after - before for before, after in zip(arrivals[12:], paced[12:], strict=True)) == 0.0


@pytest.mark.parametrize(
    ("promised", "expected"),
    [
        (CHAT, 0.4),
        (AGENT, 0.16),
        (SloTargets(0.05, 0.06), PREFILL),
        (SloTargets(gap=0.06), PREFILL + MAX_HOLD),
    ],
    ids=["until shortly before its TTFT", "a shorter TTFT", "already late", "without a TTFT"],
)
def test_the_first_token_waits_for_the_second_as_long_as_it_may(
    promised: SloTargets, expected: float
) -> None:
    assert left(promised, come(5.0, 2))[0] == pytest.approx(STARTED + expected)


def test_nothing_is_held_when_the_deadline_is_near() -> None:
    deadline = STARTED + 2.0
    arrivals = come(0.01, 150)
    paced = left(CHAT, arrivals, deadline)
    late = [pair for pair in zip(arrivals, paced, strict=True) if pair[0] >= deadline - DEADLINE_MARGIN]
    assert late
    assert all(before == after for before, after in late)
    assert left(CHAT, come(5.0, 2), STARTED + 1.3)[0] == pytest.approx(STARTED + 0.3)


def test_an_output_leaves_at_most_max_early_seconds_early() -> None:
    reserve = Reserve[int].of(CHAT, STARTED, math.inf)
    assert reserve is not None
    assert reserve.add(0, STARTED) == []
    assert reserve.add(1, STARTED) == [0]
    assert reserve.pop_due(reserve.due - MAX_EARLY - 0.001) == []
    assert reserve.pop_due(reserve.due - MAX_EARLY + 0.001) == [1]
    assert reserve.due == math.inf
