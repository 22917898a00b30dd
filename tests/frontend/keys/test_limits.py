"""Limits of API keys. The tests state the time of each call."""

import pytest

from pdserve.config.api_keys import ApiKey, KeyLimits
from pdserve.frontend.keys.limits import Bucket, KeyLedger, KeyQuota, LimitReached, in_words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0171, "18ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (61.25, "1m1.25s"),
    ],
)
def test_how_a_duration_is_written(seconds: float, text: str) -> None:
    assert in_words(seconds) == text


def test_a_bucket_fills_steadily_and_counts_below_zero() -> None:
    bucket = Bucket(60, 1, 0.0)
    bucket.take(60, 0.0)
    assert [bucket.level(now) for now in (0.0, 1.0, 30.0, 60.0, 600.0)] == [0, 1, 30, 60, 60]
    assert [bucket.wait(amount, 10.0) for amount in (5, 10, 11, 60)] == [0, 0, 1, 50]
    bucket.take(30, 10.0)
    assert (bucket.level(10.0), bucket.wait(1, 10.0)) == (-20, 21)
    bucket.take(-1000, 10.0)
    assert bucket.level(10.0) == 60


def test_usage_stays_when_the_limit_changes() -> None:
    bucket = Bucket(60, 1, 0.0)
    bucket.take(20, 0.0)
    bucket.change(100, 1, 0.0)
    assert bucket.level(0.0) == 80
    bucket.change(10, 1, 0.0)
    assert bucket.level(0.0) == -10


@pytest.mark.parametrize(
    ("limits", "begun", "frontends", "refusal"),
    [
        (KeyLimits(requests_per_minute=3), 2, 1, None),
        (KeyLimits(requests_per_minute=3), 3, 1, ("requests", 20.0)),
        (KeyLimits(requests_per_minute=3), 3, 2, ("requests", 40.0)),
        (KeyLimits(concurrent_requests=3), 2, 1, None),
        (KeyLimits(concurrent_requests=3), 3, 1, ("requests", 1.0)),
        (KeyLimits(concurrent_requests=3), 1, 2, None),
        (KeyLimits(concurrent_requests=3), 2, 2, ("requests", 1.0)),
        (KeyLimits(concurrent_requests=1), 0, 9, None),
        (KeyLimits(tokens_per_minute=1), 9, 9, None),
    ],
)
def test_whether_a_request_may_begin(
    limits: KeyLimits, begun: int, frontends: int, refusal: tuple[str, float] | None
) -> None:
    quota = KeyQuota(limits, 0.0)
    for _ in range(begun):
        quota.begin(0.0)
    quota.divide(frontends, 0.0)
    if refusal is None:
        quota.begin(0.0)
        assert quota.running == begun + 1
        return
    with pytest.raises(LimitReached) as reached:
        quota.begin(0.0)
    assert (reached.value.status, reached.value.limit, reached.value.retry_after) == (429, *refusal)
    assert quota.running == begun


def test_tokens_are_reserved_and_corrected() -> None:
    quota = KeyQuota(KeyLimits(tokens_per_minute=600), 0.0)
    quota.take("tokens", 500, 0.0)
    assert list(quota.state(0.0)) == [("tokens", 600, 100, 50.0)]
    with pytest.raises(LimitReached, match="try again in 10s") as reached:
        quota.take("tokens", 200, 0.0)
    assert (reached.value.limit, reached.value.retry_after) == ("tokens", 10.0)
    quota.count("tokens", 20 - 500, 0.0)
    assert list(quota.state(0.0)) == [("tokens", 600, 580, 2.0)]
    with pytest.raises(LimitReached, match="601 tokens") as reached:
        quota.take("tokens", 601, 0.0)
    assert reached.value.retry_after == 0


def admitted(quota: KeyQuota, seconds: int) -> int:
    """Try ten requests a second. Return how many are admitted."""
    count = 0
    for tenth in range(10 * seconds):
        try:
            quota.begin(tenth / 10)
        except LimitReached:
            continue
        count += 1
    return count


@pytest.mark.parametrize("frontends", [1, 2, 3])
def test_over_time_all_frontends_together_admit_the_limit(frontends: int) -> None:
    """The counts leave out the minute's budget with which each frontend starts."""
    counts = []
    for _ in range(frontends):
        quota = KeyQuota(KeyLimits(requests_per_minute=60), 0.0)
        quota.divide(frontends, 0.0)
        counts.append(admitted(quota, 600) - 60)
    assert 600 - frontends <= sum(counts) <= 600 + frontends


def test_one_of_several_frontends_may_admit_a_whole_minutes_tokens() -> None:
    quota = KeyQuota(KeyLimits(tokens_per_minute=600), 0.0)
    quota.divide(3, 0.0)
    quota.take("tokens", 600, 0.0)
    with pytest.raises(LimitReached) as reached:
        quota.take("tokens", 100, 0.0)
    assert reached.value.retry_after == pytest.approx(30)


def test_frontends_that_come_and_go_change_the_share() -> None:
    ledger = KeyLedger()
    ledger.replace([ApiKey.of("key", "alice", KeyLimits(requests_per_minute=60))], 0.0)
    quota = ledger.quota("alice", 0.0)
    assert quota
    quota.take("requests", 60, 0.0)
    ledger.frontends = lambda: 2
    assert ledger.quota("alice", 0.0) is quota
    assert quota.buckets["requests"].level(10.0) == 5
    ledger.frontends = lambda: 0  # the registry does not list this frontend yet
    ledger.quota("alice", 10.0)
    assert quota.buckets["requests"].level(20.0) == 15


def test_a_removed_key_has_no_quota() -> None:
    ledger, keys = KeyLedger(), [ApiKey.of("key", "alice", KeyLimits(requests_per_minute=60))]
    ledger.replace(keys, 0.0)
    ledger.replace([ApiKey.of("other", "bob")], 0.0)
    assert ledger.quota("alice", 0.0) is ledger.quota("bob", 0.0) is None
    ledger.replace(keys, 0.0)
    assert ledger.quota("alice", 0.0)
