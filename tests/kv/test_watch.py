from pdserve.kv.watch import Naps, StallWatch


def test_a_read_is_overdue_once_after_its_time() -> None:
    watch = StallWatch(floor=2.0, rate=100.0)
    assert watch.look({"a": 300}, 10.0) == []
    assert watch.look({"a": 300}, 14.9) == []
    assert watch.look({"a": 300}, 15.0) == ["a"]
    assert watch.look({"a": 300}, 99.0) == []


def test_reads_that_share_the_line_get_the_time_of_all() -> None:
    watch = StallWatch(floor=1.0, rate=100.0)
    watch.look({"a": 100}, 0.0)
    watch.look({"a": 100, "b": 100}, 0.0)
    assert watch.look({"a": 100, "b": 100}, 2.0) == ["a"]
    assert watch.look({"b": 100}, 2.9) == []
    assert watch.look({"b": 100}, 3.0) == ["b"]


def test_a_finished_read_is_forgotten() -> None:
    watch = StallWatch(floor=1.0, rate=100.0)
    watch.look({"a": 0}, 0.0)
    assert watch.look({}, 0.5) == []
    assert watch.look({"a": 0}, 5.0) == [], "another read of the same name starts anew"
    assert watch.look({"a": 0}, 6.0) == ["a"]


def test_reads_during_a_long_gap_are_doubted_until_they_end() -> None:
    naps = Naps(longest=5.0)
    naps.look([], 100.0)
    assert naps.look(["a"], 101.0) == set()
    assert naps.look(["a", "b"], 106.0) == set()
    assert naps.look(["a", "b"], 111.1) == {"a", "b"}
    assert naps.look(["a", "b", "c"], 111.2) == {"a", "b"}, "c began afterwards"
    assert naps.look(["b", "c"], 111.3) == {"b"}
    assert naps.look(["a"], 111.4) == set(), "another read of the same name"
