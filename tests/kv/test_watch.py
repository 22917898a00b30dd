import math

import pytest

from pdserve.kv.watch import HangWatch, RemoteClock, StallWatch


def test_a_read_is_overdue_once_after_its_time() -> None:
    watch = StallWatch(floor=2.0, rate=100.0)
    assert watch.update({"a": 300}, 10.0) == []
    assert watch.update({"a": 300}, 14.9) == []
    assert watch.update({"a": 300}, 15.0) == ["a"]
    assert watch.update({"a": 300}, 99.0) == []


def test_reads_that_share_the_line_get_the_time_of_all() -> None:
    watch = StallWatch(floor=1.0, rate=100.0)
    watch.update({"a": 100}, 0.0)
    watch.update({"a": 100, "b": 100}, 0.0)
    assert watch.update({"a": 100, "b": 100}, 2.0) == ["a"]
    assert watch.update({"b": 100}, 2.9) == []
    assert watch.update({"b": 100}, 3.0) == ["b"]


def test_a_finished_read_is_forgotten() -> None:
    watch = StallWatch(floor=1.0, rate=100.0)
    watch.update({"a": 0}, 0.0)
    assert watch.update({}, 0.5) == []
    assert watch.update({"a": 0}, 5.0) == [], "another read of the same name starts anew"
    assert watch.update({"a": 0}, 6.0) == ["a"]


def test_reads_during_a_hang_are_named_until_they_end() -> None:
    watch = HangWatch(longest=5.0)
    watch.update([], 100.0)
    assert watch.update(["a"], 101.0) == set()
    assert watch.update(["a", "b"], 106.0) == set()
    assert watch.update(["a", "b"], 111.1) == {"a", "b"}
    assert watch.update(["a", "b", "c"], 111.2) == {"a", "b"}, "c began afterwards"
    assert watch.update(["b", "c"], 111.3) == {"b"}
    assert watch.update(["a"], 111.4) == set(), "another read of the same name"


def test_another_hosts_clock_is_learnt_from_the_quickest_message() -> None:
    clock = RemoteClock()
    assert clock.to_local(1e9) == -math.inf, "nothing is known: every lease is over"
    clock.message(5000.0, 130.0)  # it was held back for 20 s
    clock.message(5100.0, 210.1)
    clock.message(5200.0, 350.0)
    assert clock.to_local(5220.0) == pytest.approx(330.1)
