"""The state of a graph, from the reports of its processes."""

import numpy as np
import pytest

from pdserve.contract.messages import Hop
from pdserve.contract.records import Instance
from pdserve.contract.reports import BUCKETS, MAX_REPORTED_RECEIPTS, TICK, ProcessReport, Receipt, Tick
from pdserve.observe.graph_state import GraphState, graph_state, moments, quantile, short_names


def histogram(*seconds: float) -> list[int]:
    """Count each value in the first bucket whose upper bound is not less."""
    counts = [0] * (len(BUCKETS) + 1)
    for value in seconds:
        counts[int(np.searchsorted(BUCKETS, value))] += 1
    return counts


def state(watched: dict[str, ProcessReport], *instances: Instance) -> GraphState:
    return graph_state(instances, [], {}, {}, watched)


@pytest.mark.parametrize(
    ("seconds", "share", "found"),
    [
        ((), 0.5, None),
        ((0.0005,), 0.5, 0.0005),  # the middle of the first bucket
        ((0.02, 0.02), 0.5, 0.02),  # the middle of 0.015 to 0.025
        ((0.02, 5.0), 0.5, 0.025),
        ((0.02, 1000.0), 0.95, BUCKETS[-1]),
    ],
)
def test_quantiles_interpolate_in_their_bucket(
    seconds: tuple[float, ...], share: float, found: float | None
) -> None:
    assert quantile(histogram(*seconds), share) == (found if found is None else pytest.approx(found))


def test_moments_add_histories_of_different_lengths() -> None:
    old = [Tick(requests=2, tokens=10), Tick(requests=4, failed=1, refused=2, ttft=histogram(0.02), itl=[])]
    young = [Tick(requests=6, tokens=20, ttft=histogram(0.02, 0.2))]
    before, now = moments([old, young, []])
    assert (before.age, now.age) == (TICK, 0)
    assert (before.requests, before.tokens) == (2 / TICK, 10 / TICK)
    assert (now.requests, now.failed, now.refused, now.tokens) == (10 / TICK, 1 / TICK, 2 / TICK, 20 / TICK)
    assert now.ttft_p50 == pytest.approx(0.0225)
    assert (before.ttft_p50, now.itl_p95) == (None, None)
    assert moments([]) == moments([[], []]) == []


def test_a_frontend_with_other_buckets_counts_only_for_rates() -> None:
    (now,) = moments([[Tick(requests=1, ttft=[1, 2])], [Tick(requests=1, ttft=histogram(0.02))]])
    assert now.requests == 2 / TICK
    assert now.ttft_p50 == pytest.approx(0.02)


def test_a_short_name_stands_for_one_instance() -> None:
    """tests/observe/test_problems.py tests instances that share a short name."""
    assert short_names(["decode-1-c", "odd", "decode-1-c"]) == {"decode-1-c": "decode-1", "odd": "odd"}


def test_receipts_of_all_frontends_are_merged_newest_first() -> None:
    told = [Receipt(str(age), f"frontend-{age % 2}", "/", age) for age in range(MAX_REPORTED_RECEIPTS)]
    found = state({"a": ProcessReport(receipts=told[::2]), "b": ProcessReport(receipts=told)}).receipts
    assert len(found) == MAX_REPORTED_RECEIPTS
    assert [receipt.age for receipt in found] == sorted(receipt.age for receipt in found)


def test_receipts_with_a_detour_are_kept_beyond_the_newest() -> None:
    usual = [Receipt(str(age), "a", "/", age) for age in range(MAX_REPORTED_RECEIPTS + 5)]
    fell = Receipt("fell", "a", "/", 500.0, hops=[Hop("fallback", 0.5, why="timeout")])
    found = state({"a": ProcessReport(receipts=[*usual, fell])}).receipts
    assert [receipt.request_id for receipt in found[MAX_REPORTED_RECEIPTS - 1 :]] == [
        str(MAX_REPORTED_RECEIPTS - 1),
        "fell",
    ]
