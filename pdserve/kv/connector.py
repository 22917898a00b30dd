"""pdserve's KV connector: reads a prompt's KV blocks from a prefill engine. It is vLLM's NIXL connector in pull mode
with some changes.

A read in a decode engine, in the order in which vLLM calls the connector:

1. Scheduler: `get_num_new_matched_tokens` says how many prompt tokens have KV in the prefill engine. vLLM allocates
   blocks for them, and the request waits.
2. Scheduler: `build_connector_meta` gives each rank the ids of the local and the remote blocks with the next step.
3. Rank: `start_load_kv` calls `_read_blocks_for_req`, which shakes hands with the engine before the first read from it.
   NIXL then reads while the engine runs steps for other requests.
4. Rank: `get_transfer_results` polls at each step. `_pop_done_transfers` finds the reads that have ended. `_confirm`
   keeps each until the prefill engine says whether it held the blocks.
5. Scheduler: when all ranks have reported the read, the request runs. If the read failed, the prompt is computed.

The changes:

**Idle CPU.** NIXL's progress thread sleeps between polls (`nixl.py`). The worker's main thread keeps its CPU affinity;
vLLM would pin the thread, and with it a CPU model, to the host's last core.

**Stalled reads.** On a link that drops packets a read stays in progress for as long as TCP retries, a quarter of an
hour. vLLM has no timeout, and NIXL cannot abort a read (docs/decisions/0004-stalled-reads.md). So the connector reports
the read with its statistics, and `VllmEngine` aborts the request and computes its prompt in other blocks. vLLM keeps
the blocks of an aborted request until its read has ended. Until then, other reads from that engine fail at once.

**Broken connections.** UCX gives up an endpoint whose peer was silent for some seconds. From then on every read and
notification fails, even if the peer is back, because vLLM connects anew only if NIXL dropped the peer's metadata. Here
vLLM connects anew after every transport failure, once the running reads have ended.

**Leases.** A read does not check whether the blocks still hold the prompt's KV. So before vLLM hears that a read has
ended, the prefill engine is asked whether it held them until now (`leases.py`). If it did not, or does not answer, the
prompt is recomputed.

**Handshakes.** A handshake with a peer that does not answer takes 5 s. For a while after it failed, reads from that
peer fail at once, and the decode worker sends it no prompts (`UNREACHABLE`).

The private parts of vLLM that this relies on are in `tools/vllm_surface.py`, which a test compares with vLLM."""

import time
from threading import Event
from typing import Any

from pdserve.kv import AFTER, CHUNK, COMPLETE, FAILED, READS, RELEASED, STALLED, UNREACHABLE, side_channel
from pdserve.kv.nixl import affinity_kept, provide_nixl, quiet_agents

provide_nixl()

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (  # noqa: E402
    NixlBaseConnector,
    NixlPullConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (  # noqa: E402
    NixlPullConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats  # noqa: E402
from vllm.logger import init_logger  # noqa: E402
from vllm.utils.network_utils import make_zmq_path  # noqa: E402

from pdserve.kv.prefill_chunk import PrefillChunk  # noqa: E402
from pdserve.kv.read_ahead.scheduler import PIECE_OF, RankReport, ReadAheadScheduler  # noqa: E402
from pdserve.kv.side_channel import Confirmations, Source  # noqa: E402
from pdserve.kv.stalled_reads import ReadTimes, StallWatch  # noqa: E402

logger = init_logger(__name__)

_KEYS = (STALLED, FAILED, READS, RELEASED, UNREACHABLE, COMPLETE)
FLOOR, RATE = 3.0, 50e6
"""Seconds, and bytes per second, from which `StallWatch` computes when a read is stalled."""
HANDSHAKE_PAUSE = 10.0
"""Seconds after a failed handshake before the next attempt with that engine."""


class PdserveConnector(NixlPullConnector):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = ConnectorScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            with affinity_kept(), quiet_agents():
                self.connector_worker = ConnectorWorker(vllm_config, self.engine_id, kv_cache_config)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.connector_scheduler.bind(kv_cache_manager)

    def build_connector_worker_meta(self) -> RankReport | None:
        worker = self.connector_worker
        report, worker.report = worker.report, RankReport()
        return None if report.is_empty else report

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return TransferStats(data=data) if data is not None else TransferStats()


class ConnectorScheduler(ReadAheadScheduler):
    """Adds pdserve's handshake listener, support for tokens after the prefilled prompt, and a limit for the prompt
    tokens of a step."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._chunk = PrefillChunk(vllm_config.scheduler_config, self.block_size)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            self._chunk.shorten_next_step()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._chunk.add(request)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._chunk.on_step(scheduler_output.num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if connector_output.finished_recving:
            self._chunk.shorten_next_step()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._chunk.remove(request.request_id)
        if (tokens := (request.kv_transfer_params or {}).get(CHUNK)) is not None:
            self._chunk.set_limit(tokens)
            return False, None
        kept: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return kept

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Leave out the tokens after the prompt, for which the prefill engine has no KV; vLLM counts them."""
        count, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if count is not None:
            count = max(0, count - (request.kv_transfer_params or {}).get(AFTER, 0))
        return count, bool(count)

    def _nixl_handshake_listener(
        self, encoded_data: Any, ready_event: Event, stop_event: Event, host: str, port: int
    ) -> None:
        path, key = make_zmq_path("tcp", host, port), side_channel.CurveKey.configured(self.vllm_config)
        side_channel.listen(encoded_data, ready_event, stop_event, path, logger, key, self.is_held)


class TransferStats(NixlKVConnectorStats):  # type: ignore[misc]
    """vLLM's statistics and those of pdserve (keys in `kv/__init__.py`)."""

    def reset(self) -> None:
        super().reset()
        self.data |= {key: [] for key in _KEYS}

    def is_empty(self) -> bool:
        return not any(self.data[key] for key in _KEYS) and bool(super().is_empty())


class ConnectorWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """Reports reads that stall, fail or are not confirmed; their prompts are recomputed."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        key = side_channel.CurveKey.configured(vllm_config)
        self._confirmations = Confirmations(key)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        base_worker.zmq_ctx = side_channel.dialer(key)
        self.xfer_stats = TransferStats()
        self._stalls = StallWatch(FLOOR, RATE)
        self._no_handshake_before: dict[str, float] = {}
        """Monotonic time, by engine id."""
        self._reads = ReadTimes()
        self.report = RankReport()

    def start_load_kv(self, metadata: Any) -> None:
        if self.tp_rank == 0:
            self.xfer_stats.data[COMPLETE] += metadata.complete
        super().start_load_kv(metadata)

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        if time.monotonic() < self._no_handshake_before.get(meta.remote.engine_id, 0.0):
            self._handle_failed_transfer(req_id, None, self._recv_failures)
        else:
            if req_id in self._recving_metadata:
                self._reads.begin(req_id, meta.remote.engine_id, self._bytes_of(req_id))
            super()._read_blocks_for_req(req_id, meta)

    def _log_failure(self, failure_type: str, req_id: str | None, *args: Any, **context: Any) -> None:
        super()._log_failure(failure_type, req_id, *args, **context)
        if failure_type == "handshake_setup_failed":
            engine = context["remote_engine_id"]
            self._no_handshake_before[engine] = time.monotonic() + HANDSHAKE_PAUSE
            self.xfer_stats.data[UNREACHABLE].append(engine)
            return
        self._disconnect(context.get("dst_engine_id") or self._engine_of(req_id))

    def _disconnect(self, engine: str | None) -> None:
        """Have vLLM shake hands with this engine again; once for all reads that fail together, because vLLM doubles the
        wait before the handshake each time."""
        if engine in self._remote_agents and engine not in self._invalid_remote_engines:
            self._mark_remote_engine_invalid(engine, time.perf_counter())

    def get_transfer_results(self) -> Any:
        results = super().get_transfer_results()
        self.xfer_stats.data[READS] += self._reads.end(results.finished_recving, results.failed_recving)
        self.report.move(results)
        self.xfer_stats.data[RELEASED] += results.finished_sending
        self.xfer_stats.data[FAILED] += results.failed_recving
        return results

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        self._confirm(done, failed, transfers)
        sizes = {name: self._bytes_of(name) for name in transfers if name not in self._confirmations}
        for request in self._stalls.update(sizes, time.monotonic()):
            self._report_stall(request)
        return done, failed

    def _confirm(self, done: set[str], failed: set[str], transfers: dict[str, list[Any]]) -> None:
        """Keep ended reads in `transfers`, without handles, until their prefill engine says whether it held the KV.
        Reads that failed on this rank are recomputed anyway."""
        good = done - failed - self._recv_failures
        sources = {name: source for name in good if (source := self._source(name)) is not None}
        held, lost = self._confirmations.update(sources)
        for request in lost:
            source = sources[request]
            logger.warning(
                "request %s: %s did not confirm that it held the KV; recomputing it", request, source.engine
            )
            self._handle_failed_transfer(request, None, failed)
        for request in sources.keys() - held - lost:
            done.discard(request)
            transfers[request] = []

    def _source(self, request: str) -> Source | None:
        """Return the prefill whose KV was read for this request or read-ahead piece; None: nothing was read."""
        meta = self._recving_metadata.get(request)
        if meta is None or meta.remote is None or not any(meta.local_block_ids):
            return None
        path = make_zmq_path("tcp", meta.remote.host, meta.remote.port)
        return Source(path, meta.remote.engine_id, meta.remote.request_id.removeprefix(PIECE_OF))

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        before = set(done_sending)
        super()._reap_expired_send_leases(done_sending)
        self.report.expired |= done_sending - before

    def shutdown(self) -> None:
        super().shutdown()
        self._confirmations.close()

    def _bytes_of(self, request: str) -> int:
        meta = self._recving_metadata.get(request)
        if meta is None:
            return 0
        blocks = sum(len(group) for group in meta.local_physical_block_ids)
        return blocks * sum(self.block_len_per_layer)

    def _engine_of(self, request: str | None) -> str | None:
        meta = self._recving_metadata.get(request)
        return None if meta is None or meta.remote is None else meta.remote.engine_id

    def _report_stall(self, request: str) -> None:
        engine = self._engine_of(request)
        if engine is None:
            return
        logger.warning(
            "request %s: the KV read from %s stalled; recomputing it in other blocks", request, engine
        )
        self.report.bad.add(request)
        self.xfer_stats.data[STALLED].append(request)
        self.xfer_stats.record_failed_transfer()
        self._disconnect(engine)
