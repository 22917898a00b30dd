"""Costs of local and remote prefill."""

from collections.abc import Sequence

import pytest

from pdserve.contract.messages import PrefillLoad
from pdserve.decode.policy.cost import (
    LATER_PROMPTS,
    MIN_BEGIN,
    Estimates,
    RemoteWorker,
    SeenLoad,
    estimate,
    prefix_choice,
)

FAST, SLOW = 1 / 20_000, 1 / 2_000
"""seconds per token"""


def found(
    *,
    compute: int = 1000,
    streams: int = 0,
    ahead: int = 0,
    queued: float = 0,
    rate: float = 0.0,
    slowdown: float = 0.0,
    remote: Sequence[tuple[float, float]],
) -> Estimates:
    return estimate(
        compute,
        1000,
        streams=streams,
        local_ahead=ahead,
        local_token=FAST,
        queued=queued,
        remote=[RemoteWorker(f"prefill-{at}", *each) for at, each in enumerate(remote)],
        handover=0.02,
        rate=rate,
        slowdown=slowdown,
    )


def test_a_local_prompt_waits_for_earlier_prompts_and_delays_streams() -> None:
    costs = found(compute=400, streams=3, ahead=600, remote=[(0, FAST)])
    parts = (costs.local_wait, costs.local_compute, costs.streams)
    assert parts == pytest.approx((0.03, 0.02, 3))
    assert not costs.is_idle


@pytest.mark.parametrize(
    ("queued", "remote", "wait", "compute"),
    [
        (0, [(0, FAST)], 0.0, 0.05),
        (2000, [(0, FAST)], 0.1, 0.05),
        (1000, [(1000, FAST)], 0.1, 0.05),
        (2000, [(0, FAST), (0, FAST)], 0.05, 0.05),
        (0, [(2000, FAST), (0, FAST)], 0.05, 0.05),
        (0, [(0, SLOW)], 0.0, 0.5),
        (2200, [(0, FAST), (0, SLOW)], 0.1, 2 / 22),
    ],
    ids=["idle", "queued", "queued and pulled", "two workers", "one is busy", "slow", "fast and slow"],
)
def test_prefill_workers_share_the_prompts_ahead(
    queued: float, remote: Sequence[tuple[float, float]], wait: float, compute: float
) -> None:
    costs = found(queued=queued, remote=remote)
    assert (costs.remote_wait, costs.remote_compute, costs.handover) == pytest.approx((wait, compute, 0.02))


@pytest.mark.parametrize(
    ("tokens", "age", "own", "left", "token_seconds"),
    [
        (2000, 0.0, 0, 2000, FAST),
        (2000, 0.05, 0, 1000, FAST),
        (2000, 9.0, 0, 0, FAST),
        (2000, 0.05, 2000, 1000, FAST),
        (2000, 0.11, 1000, 200, 0.11 / 2000),
        (2000, 1.0, 1000, 1000, 1.0 / 2000),
        (0, 1.0, 1000, 1000, FAST),
    ],
    ids=["just pulled", "half done", "long done", "half done, own", "a little late", "late", "no report"],
)
def test_the_tokens_a_prefill_worker_has_left_shrink_with_time(
    tokens: int, age: float, own: int, left: float, token_seconds: float
) -> None:
    seen = SeenLoad(PrefillLoad(tokens, FAST), age)
    assert seen.left(own, FAST) == pytest.approx((left, token_seconds))


def test_a_second_of_delay_costs_the_same_for_any_request() -> None:
    alone, beside = found(remote=[(0, FAST)]), found(streams=3, remote=[(0, FAST)])
    assert beside.local_cost - alone.local_cost == pytest.approx(3 * alone.local_compute)
    seldom, often = (found(queued=1000, rate=rate, remote=[(0, FAST)]) for rate in (0.0, 20.0))
    assert seldom.remote_cost == pytest.approx(0.05 + 0.05 + 0.02)
    assert often.remote_cost - seldom.remote_cost == pytest.approx(LATER_PROMPTS * 20.0 * 0.05 * 0.05), (
        "delay of later prompts"
    )


def worker(name: str, ahead: float = 0, cached: int = 0, token: float = FAST) -> RemoteWorker:
    return RemoteWorker(name, ahead, token, cached)


@pytest.mark.parametrize(
    ("remote", "queued", "chosen"),
    [
        ([worker("a"), worker("b")], 0, None),
        ([worker("a", cached=1900), worker("b")], 0, "a"),
        ([worker("a", cached=900), worker("b", cached=1900)], 0, "b"),
        ([worker("a", cached=1900), worker("b", cached=1900)], 0, None),
        ([worker("a", 5000, 1900), worker("b", cached=1900)], 0, None),
        ([worker("a", 1000, 1900), worker("b")], 0, None),
        ([worker("a", 800, 1900), worker("b")], 0, "a"),
        ([worker("a", 3000, 1900), worker("b", 3000)], 4000, "a"),
        ([worker("a", cached=1000, token=SLOW), worker("b")], 0, None),
        ([worker("a", cached=30), worker("b")], 0, None),
        ([worker("a", cached=190), worker("b")], 0, None),
        ([worker("a", cached=1900)], 0, None),
    ],
    ids=[
        "no worker has the prefix",
        "one worker has the prefix",
        "one worker has more of the prefix",
        "both workers have the prefix",
        "both have the prefix, one is busy",
        "the wait costs more than the prefix saves",
        "the wait costs less than the prefix saves",
        "both workers are busy",
        "the worker with the prefix is slow",
        "the prefix is short",
        "the prefix is a small part of the prompt",
        "there is only one worker",
    ],
)
def test_a_prompt_goes_to_the_worker_with_its_prefix_if_that_saves_time(
    remote: list[RemoteWorker], queued: float, chosen: str | None
) -> None:
    choice = prefix_choice(2000, remote, queued, rate=0.0)
    assert (choice and choice.worker) == chosen
    if choice is not None:
        wait = next(each.wait for each in remote if each.id == chosen)
        assert choice.begin_within >= MIN_BEGIN + wait


def test_a_busy_graph_waits_longer_for_a_prefix() -> None:
    """Tokens that are computed again delay the prompts after this one."""
    remote = [worker("a", 7500, 1900), worker("b", 5000)]
    assert prefix_choice(2000, remote, 0, rate=0.0) is None
    assert prefix_choice(2000, remote, 0, rate=10.0) is not None


def test_local_competes_with_the_worker_that_has_the_prefix() -> None:
    def estimates(cached: int) -> Estimates:
        remote = [worker("a", cached=cached), worker("b")]
        return estimate(
            1000, 2000, streams=0, local_ahead=0, local_token=FAST, queued=0, remote=remote, handover=0.01
        )

    assert (estimates(0).better, estimates(0).prefix) == ("local", None)
    assert estimates(1900).better == "remote"
    assert str(estimates(1900)).endswith("a has 1900 tokens cached and saves 48 ms")
