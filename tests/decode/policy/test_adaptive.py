"""TTFT and gaps under the policy `adaptive`, in virtual time, so that this machine's speed does not count."""

import pytest

from pdserve.config.schema import DecodeSection
from tests.decode.virtual import ADAPTIVE, ALL_LOCAL, ALL_REMOTE, LOADS, THRESHOLD, Figures, VirtualGraph


@pytest.mark.parametrize("load", LOADS)
def test_adaptive_is_no_slower_than_thresholds_under_any_load(load: str) -> None:
    adaptive, threshold = (Figures.of(LOADS[load](VirtualGraph(each))) for each in (ADAPTIVE, THRESHOLD))
    assert adaptive.ttft50 < 1.05 * threshold.ttft50
    assert adaptive.ttft99 < 1.05 * threshold.ttft99
    assert adaptive.gap99 < 65, "at most the step of a whole prompt"
    assert adaptive.itl99 < 30, "at most the step of a chunk"


def test_saturated_workers_of_both_kinds_prefill() -> None:
    adaptive, threshold = (
        Figures.of(LOADS["32 clients"](VirtualGraph(each))) for each in (ADAPTIVE, THRESHOLD)
    )
    assert 0.2 < adaptive.local < 0.5
    assert adaptive.ttft50 < 0.65 * threshold.ttft50


def finish(
    settings: DecodeSection, slow: tuple[float, float], load: float, one_core: bool = False
) -> tuple[float, float]:
    """Return the median of the seconds to the last token, and the share of requests with a first token within 500 ms
    and no gap over 60 ms."""
    graph = VirtualGraph(settings, slow=slow, one_core=one_core)
    done = sorted(graph.poisson(load * (10 / slow[0] + 14 / slow[1]), 40), key=lambda each: each.begun)[30:]
    inside = [each.ttft <= 0.5 and each.longest_gap <= 0.06 for each in done]
    return sorted(each.times[-1] - each.begun for each in done)[len(done) // 2], sum(inside) / len(inside)


@pytest.mark.parametrize("load", [0.1, 0.25, 0.6])
@pytest.mark.parametrize("slow", [(0.3, 0.3), (1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (2.0, 2.0)], ids=str)
def test_without_a_promise_adaptive_is_about_as_good_as_the_better_way(
    slow: tuple[float, float], load: float
) -> None:
    (local, local_kept), (remote, remote_kept), (median, share) = (
        finish(settings, slow, load) for settings in (ALL_LOCAL, ALL_REMOTE, ADAPTIVE)
    )
    assert median <= 1.09 * min(local, remote)
    assert share >= max(local_kept, remote_kept) - 0.04


@pytest.mark.parametrize("load", [0.1, 0.2])
def test_on_one_shared_core_adaptive_is_about_as_good_as_local_prefill(load: float) -> None:
    (local, _), (remote, _), (median, _) = (
        finish(settings, (1.0, 1.0), load, one_core=True) for settings in (ALL_LOCAL, ALL_REMOTE, ADAPTIVE)
    )
    assert median <= local + (remote - local) / 4


def test_on_slow_workers_adaptive_keeps_the_slo_more_often_than_remote_prefill() -> None:
    assert finish(ADAPTIVE, (4.0, 4.0), 0.4)[1] > finish(ALL_REMOTE, (4.0, 4.0), 0.4)[1] + 0.08


def test_adaptive_is_faster_with_several_workers_of_each_kind() -> None:
    adaptive, threshold = (
        Figures.of(VirtualGraph(each, prefill=2, decode=2).poisson(40, 30)) for each in (ADAPTIVE, THRESHOLD)
    )
    assert adaptive.ttft50 < 0.6 * threshold.ttft50


def test_a_prefill_worker_that_gets_slow_is_avoided_until_it_is_fast_again() -> None:
    graph = VirtualGraph(ADAPTIVE)
    graph.after(20, lambda: setattr(graph.prefill[0], "slow", 10.0))
    graph.after(60, lambda: setattr(graph.prefill[0], "slow", 1.0))
    done = graph.poisson(8, 120)
    before, slow, after = (Figures.of(done, *when) for when in ((3, 20), (25, 60), (75, 120)))
    assert slow.ttft50 < 1.5 * before.ttft50
    assert slow.local > 0.85
    assert after.local < 0.6


def test_a_prefill_worker_that_stops_answering_gets_few_more_prompts() -> None:
    graph = VirtualGraph(ADAPTIVE)
    graph.after(20, lambda: setattr(graph.prefill[0], "slow", 1e9))
    graph.poisson(8, 40)
    waiting = graph.decode[0].live
    assert all(request.remote_tokens for request in waiting), "a local prompt was not computed"
    assert 1 <= len(waiting) <= 6


@pytest.mark.parametrize("rate", [44, 144])
def test_reports_at_a_bounded_rate_serve_nearly_as_well_as_broadcasts(rate: int) -> None:
    found, reports = [], []
    for broadcasts in (True, False):
        graph = VirtualGraph(ADAPTIVE, prefill=2 if rate == 44 else 8, decode=8, broadcasts=broadcasts)
        found.append(Figures.of(graph.poisson(rate, 12)))
        reports.append(graph.reports / len(graph.done))
    exact, reported = found
    assert reported.ttft50 < 1.05 * exact.ttft50
    assert reported.ttft99 < 1.4 * exact.ttft99
    assert reported.local == pytest.approx(exact.local, abs=0.06)
    assert reports[1] < 0.35
