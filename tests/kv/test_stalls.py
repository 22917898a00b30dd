"""KV reads that stall together, from one prefill worker."""

from types import SimpleNamespace
from typing import Any

from pdserve.kv.nixl import provide_nixl


def test_reads_that_stall_together_pause_the_next_handshake_once() -> None:
    """vLLM doubles the pause each time: six reads on one slow link were 16 s without remote prefill, in which the KV of
    what came was neither read nor rejected."""
    provide_nixl()
    from pdserve.kv.connector import ConnectorWorker, TransferStats

    worker: Any = object.__new__(ConnectorWorker)
    reads = [f"request-{number}" for number in range(6)]
    source = SimpleNamespace(remote=SimpleNamespace(engine_id="prefill-0"))
    worker._recving_metadata = dict.fromkeys(reads, source)
    worker._remote_agents, worker._invalid_remote_engines = {"prefill-0": {}}, set()
    worker._invalid_engine_backoff = {}
    worker.xfer_stats, worker.ahead = TransferStats(), SimpleNamespace(bad=set())
    for read in reads:
        worker._report_stall(read)
    assert worker.ahead.bad == set(reads)
    ((pause, _),) = worker._invalid_engine_backoff.values()
    assert pause == 0
