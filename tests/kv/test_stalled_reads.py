"""KV reads that stall."""

from types import SimpleNamespace
from typing import Any

from pdserve.kv.nixl import provide_nixl
from pdserve.kv.stalled_reads import StallWatch


def test_a_read_is_overdue_once_after_its_time() -> None:
    watch = StallWatch(floor=2.0, rate=100.0)
    assert watch.update({"a": 300}, 10.0) == []
    assert watch.update({"a": 300}, 14.9) == []
    assert watch.update({"a": 300}, 15.0) == ["a"]
    assert watch.update({"a": 300}, 99.0) == []


def test_a_read_may_take_as_long_as_all_reads_under_way_at_its_start() -> None:
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


def test_reads_that_stall_together_count_as_one_failure() -> None:
    """After a first failure, the next handshake follows without a pause. In vLLM, each stalled read is a failure, and
    six of them pause remote prefill for 16 s."""
    provide_nixl()
    from pdserve.kv.connector import ConnectorWorker, TransferStats

    worker: Any = object.__new__(ConnectorWorker)
    reads = [f"request-{number}" for number in range(6)]
    source = SimpleNamespace(remote=SimpleNamespace(engine_id="prefill-0"))
    worker._recving_metadata = dict.fromkeys(reads, source)
    worker._remote_agents, worker._invalid_remote_engines = {"prefill-0": {}}, set()
    worker._invalid_engine_backoff = {}
    worker.xfer_stats, worker.report = TransferStats(), SimpleNamespace(bad=set())
    for read in reads:
        worker._report_stall(read)
    assert worker.report.bad == set(reads)
    ((pause, _),) = worker._invalid_engine_backoff.values()
    assert pause == 0
