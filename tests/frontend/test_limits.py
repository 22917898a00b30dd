"""Limits of API keys, by a clock of the test's own."""

import math

import pytest

from pdserve.config.api_keys import ApiKey, KeyLimits
from pdserve.frontend.limits import SILENT, Bucket, KeyLedger, KeyQuota, LimitReached, in_words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0171, "18ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (61.25, "1m1.25s"),
    ],
)
def test_how_a_time_is_written(seconds: float, text: str) -> None:
    assert in_words(seconds) == text


def test_a_bucket_fills_steadily_and_counts_below_zero() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(60, 0.0)
    assert [bucket.level(now) for now in (0.0, 1.0, 30.0, 60.0, 600.0)] == [0, 1, 30, 60, 60]
    assert [bucket.wait(amount, 10.0) for amount in (5, 10, 11, 60)] == [0, 0, 1, 50]
    bucket.take(30, 10.0)
    assert (bucket.level(10.0), bucket.wait(1, 10.0)) == (-20, 21)
    bucket.take(-1000, 10.0)
    assert bucket.level(10.0) == 60


def test_what_was_used_stays_used_under_another_limit() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(20, 0.0)
    bucket.change(100, 0.0)
    assert bucket.level(0.0) == 80
    bucket.change(10, 0.0)
    assert bucket.level(0.0) == -10


@pytest.mark.parametrize(
    ("limits", "begun", "elsewhere", "refusal"),
    [
        (KeyLimits(requests_per_minute=3), 2, 50, None),
        (KeyLimits(requests_per_minute=3), 3, 0, ("requests", 20.0)),
        (KeyLimits(concurrent_requests=3), 2, 0, None),
        (KeyLimits(concurrent_requests=3), 3, 0, ("requests", 1.0)),
        (KeyLimits(concurrent_requests=3), 1, 2, ("requests", 1.0)),
        (KeyLimits(tokens_per_minute=1), 9, 9, None),
    ],
)
def test_whether_a_request_may_begin(
    limits: KeyLimits, begun: int, elsewhere: int, refusal: tuple[str, float] | None
) -> None:
    quota = KeyQuota(limits, 0.0)
    for _ in range(begun):
        quota.begin(0, 0.0)
    if refusal is None:
        quota.begin(elsewhere, 0.0)
        assert quota.running == begun + 1
        return
    with pytest.raises(LimitReached) as reached:
        quota.begin(elsewhere, 0.0)
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


class Frontends:
    """Several of one graph, whose reports all arrive, or none."""

    def __init__(self, count: int, **limits: int) -> None:
        self.now = 0.0
        self.keys = [ApiKey.of("key", "alice", KeyLimits(**limits))]
        self.ledgers = [self.new(f"frontend-{number}") for number in range(count)]

    def new(self, name: str) -> KeyLedger:
        ledger = KeyLedger(name)
        ledger.replace(self.keys, self.now)
        return ledger

    def report(self, lost: bool = False) -> int:
        """All report; returns how many had something to tell."""
        reports = [report for ledger in self.ledgers if (report := ledger.report(self.now))]
        for report in reports:
            for ledger in self.ledgers:
                if not lost:
                    ledger.heard(report, self.now)
        return len(reports)

    def try_each(self, times: int, running: bool = False) -> int:
        """Requests at all frontends in turn; returns how many were admitted."""
        admitted = 0
        for _ in range(times):
            for ledger in self.ledgers:
                quota = ledger.quota("alice")
                assert quota
                try:
                    quota.begin(ledger.elsewhere("alice"), self.now)
                except LimitReached:
                    continue
                admitted += 1
                quota.running -= not running
        return admitted

    def left(self) -> list[float]:
        quotas = [ledger.quota("alice") for ledger in self.ledgers]
        return [quota.buckets["requests"].level(self.now) for quota in quotas if quota]


def test_frontends_share_a_limit() -> None:
    frontends = Frontends(3, requests_per_minute=60)
    frontends.report()
    assert frontends.try_each(10) == 30
    frontends.report()
    assert frontends.left() == [30, 30, 30]
    assert frontends.try_each(10) == 30
    frontends.report()
    assert frontends.left() == [0, 0, 0]
    assert frontends.try_each(10) == 0
    frontends.now += 60
    frontends.report()
    assert (
        frontends.try_each(100) == 180
    )  # all at once, before they hear of each other: it is taken from later
    frontends.report()
    assert frontends.left() == [-120, -120, -120]


def test_over_time_frontends_admit_what_one_would() -> None:
    frontends = Frontends(3, requests_per_minute=600)
    admitted = 0
    for _ in range(4 * 120):
        admitted += frontends.try_each(20)
        frontends.report()
        frontends.now += 0.25
    assert 590 + 1200 <= admitted <= 600 + 1200 + 2 * 600


def test_a_lost_report_is_made_good_by_the_next() -> None:
    frontends = Frontends(2, requests_per_minute=60)
    frontends.try_each(1)
    frontends.report()
    frontends.try_each(4)
    frontends.report(lost=True)
    frontends.try_each(5)
    frontends.report()
    assert frontends.left() == [40, 40]


def test_a_frontend_that_comes_later_knows_what_is_left() -> None:
    frontends = Frontends(2, requests_per_minute=60)
    frontends.report()
    frontends.try_each(20)
    frontends.report()
    frontends.ledgers.append(frontends.new("late"))
    frontends.now += 1
    frontends.report()
    assert frontends.left() == [21, 21, 21]
    frontends.try_each(1)
    frontends.report()
    assert frontends.left() == [18, 18, 18]


def test_what_came_back_long_ago_is_not_taken_again() -> None:
    """A key that uses little is full at each report, and its sums grow nevertheless."""
    frontends = Frontends(2, requests_per_minute=6000)
    for _ in range(100):
        frontends.try_each(1)
        frontends.report()
        frontends.now += 0.5
    late = frontends.new("late")
    frontends.ledgers.append(late)
    frontends.now += 2
    frontends.report()
    frontends.try_each(1)
    frontends.report()
    assert min(frontends.left()) == 5997


def test_concurrent_requests_count_at_all_frontends() -> None:
    frontends = Frontends(2, concurrent_requests=4)
    frontends.report()
    first, second = (ledger.quota("alice") for ledger in frontends.ledgers)
    assert first
    assert second
    assert frontends.try_each(1, running=True) == 2
    frontends.report()
    assert frontends.try_each(1, running=True) == 2
    frontends.report()
    assert frontends.try_each(5, running=True) == 0
    first.running -= 1
    frontends.report()
    second.begin(frontends.ledgers[1].elsewhere("alice"), frontends.now)
    del frontends.ledgers[0]  # it is gone, and its requests with it
    frontends.now += SILENT
    frontends.report()
    assert frontends.ledgers[0].elsewhere("alice") == 0


def test_reports_are_sent_where_there_is_something_to_tell() -> None:
    frontends = Frontends(2, requests_per_minute=60)
    assert frontends.report() == 2
    assert frontends.report() == 0
    frontends.try_each(1)
    assert frontends.report() == 2
    frontends.now += 0.1
    assert frontends.report() == 0
    frontends.now += 0.9
    assert frontends.report() == 2
    one = frontends.ledgers[0]
    quota = one.quota("alice")
    assert quota
    quota.begin(0, frontends.now)
    assert frontends.report() == 1
    assert frontends.report() == 0
    quota.running -= 1
    report = one.report(frontends.now)
    assert report
    assert report.keys["alice"].running == 0


def test_of_very_many_busy_keys_all_are_reported_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.frontend.limits.MOST_TOLD", 2)
    names = ["alice", "bob", "carol", "dave", "erin"]
    one, other = KeyLedger("one"), KeyLedger("other")
    for ledger in (one, other):
        ledger.replace([ApiKey.of(name, name, KeyLimits(concurrent_requests=1)) for name in names], 0.0)
    quotas = [quota for name in names if (quota := one.quota(name))]
    for quota in quotas:
        quota.begin(0, 0.0)

    def report(at: float) -> None:
        found = one.report(at)
        assert found
        assert len(found.keys) <= 2
        other.heard(found, at)

    for turn in range(3):
        report(turn * 0.25)
    assert [other.elsewhere(name) for name in names] == [1, 1, 1, 1, 1]
    for quota in quotas[1:]:
        quota.running -= 1
    for turn in range(2):
        report(0.75 + turn * 0.25)
    assert [other.elsewhere(name) for name in names] == [1, 0, 0, 0, 0]


def test_keys_that_come_and_go_leave_nothing() -> None:
    frontends = Frontends(2, requests_per_minute=60)
    frontends.report()
    frontends.try_each(3)
    frontends.report()
    one = frontends.ledgers[0]
    one.replace([ApiKey.of("other", "bob")], frontends.now)
    assert one.quota("alice") is one.quota("bob") is None
    one.replace(frontends.keys, frontends.now)
    frontends.now += 1
    frontends.report()
    assert math.isclose(frontends.left()[0], 55)
    frontends.ledgers = [one]
    frontends.now += SILENT
    frontends.report()
    assert not one._others


def test_a_key_without_limits_has_no_quota() -> None:
    ledger = KeyLedger("frontend")
    ledger.replace([ApiKey.of("key", "alice")], 0.0)
    assert ledger.quota("alice") is ledger.quota("") is None
