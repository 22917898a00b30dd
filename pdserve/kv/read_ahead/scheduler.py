"""The connector's scheduler: holds KV under leases in a prefill engine, and reads KV ahead in a decode engine
(`blocks.py`)."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

from pdserve.kv import AHEAD, PREEMPTED
from pdserve.kv.leases import Leases
from pdserve.kv.read_ahead.blocks import MIN_FREE_SHARE, MIN_PIECE_BYTES, ReadAhead, Source

ADOPTED = "pdserve_adopted"
"""Key in a request's transfer parameters: number of tokens in the prefix cache that were read ahead."""
PIECE_OF = "HB:"
"""Precedes the prefill's id in reads of a piece: vLLM takes the notification for a heartbeat and frees nothing."""


class RankReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the ranks report to the scheduler: ended reads of pieces, and KV leases that ran out."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        """Piece -> number of ranks whose reads of it have ended."""
        self.bad: set[str] = set()
        """Pieces whose read failed or is overdue on any rank; request ids among them are ignored."""
        self.expired: set[str] = set()
        """Prefills whose KV a rank will free although it was not read."""

    def move(self, results: Any) -> None:
        """Move pieces from vLLM's results to this report, because vLLM's scheduler does not know them."""
        pieces = {name for name in results.finished_recving if name.startswith(ReadAhead.PREFIX)}
        self.ended.update(pieces)
        self.bad |= pieces & results.failed_recving
        results.finished_recving -= pieces
        results.failed_recving -= pieces

    @property
    def is_empty(self) -> bool:
        return not (self.ended or self.bad or self.expired)

    def aggregate(self, other: Any) -> "RankReport":
        self.ended += other.ended
        self.bad |= other.bad
        self.expired |= other.expired
        return self


class ReadAheadScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    cache_manager: Any
    """vLLM's KVCacheManager."""
    pool: Any
    """The manager's BlockPool."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        self._ahead = ReadAhead(parallel.world_size)
        self._leases = Leases()
        self._can_read_ahead = len(kv_cache_config.kv_cache_groups) == 1 and not self._is_hma_required
        self._can_read_ahead &= cache.enable_prefix_caching and parallel.decode_context_parallel_size == 1
        sizes = (tensor.size for tensor in kv_cache_config.kv_cache_tensors)
        self._block_bytes = self.transfer_tp_size * sum(sizes) // kv_cache_config.num_blocks
        self._prefills: dict[str, tuple[Any, int]] = {}
        """Prefill for another engine -> its request, and the number of its blocks that were reported as complete."""
        self._pieces: list[tuple[Any, dict[str, Any]]] = []

    def bind(self, kv_cache_manager: Any) -> None:
        self.cache_manager = kv_cache_manager
        self.pool = kv_cache_manager.block_pool

    # in a prefill engine

    def is_held(self, engine: str, prefill: str) -> bool:
        return engine == self.engine_id and self._leases.is_held(prefill)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            self._leases.begin(request.request_id)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        params = request.kv_transfer_params or {}
        if self._can_read_ahead and params.get("do_remote_decode"):
            self._prefills[request.request_id] = request, 0
        if (adopted := params.pop(ADOPTED, 0)) and (stats := request.prefill_stats):
            adopted = min(adopted, stats.num_local_cached_tokens)
            stats.num_local_cached_tokens -= adopted
            stats.num_external_cached_tokens += adopted

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._ahead.drop_expired(self.pool, time.perf_counter())
        self._ahead.make_room(MIN_FREE_SHARE / 2 * self.pool.num_gpu_blocks, self.pool)
        meta = super().build_connector_meta(scheduler_output)
        for piece, params in self._pieces:
            name = PIECE_OF + params["remote_request_id"]
            params = params | {"remote_block_ids": [piece.remote], "remote_request_id": name}
            meta.add_new_req_to_recv(piece.name, (piece.local,), params, awaiting_kvs=True)
        self._pieces = []
        meta.complete = list(self._complete(scheduler_output.num_scheduled_tokens))
        return meta

    def _complete(self, scheduled: dict[str, int]) -> Iterator[dict[str, Any]]:
        """Handles of all complete blocks of prompts that need more steps, if `MIN_PIECE_BYTES` of them are new."""
        for name in scheduled.keys() & self._prefills.keys():
            request, named = self._prefills[name]
            computed = request.num_computed_tokens + scheduled[name]
            complete = computed // self.block_size
            if (
                computed < request.num_prompt_tokens
                and (complete - named) * self._block_bytes >= MIN_PIECE_BYTES
            ):
                self._prefills[name] = request, complete
                blocks = self.cache_manager.get_block_ids(name)[0][:complete]
                yield {
                    "remote_engine_id": self.engine_id,
                    "remote_request_id": name,
                    "remote_block_ids": [blocks],
                    "remote_host": self.side_channel_host,
                    "remote_port": self.side_channel_port,
                    "tp_size": self.transfer_tp_size,
                }

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._prefills.pop(request.request_id, None)
        params = request.kv_transfer_params or {}
        if AHEAD in params:
            self._read_ahead(params)
            return False, None
        if params.get("do_remote_prefill"):
            self._ahead.drop(_source(params), self.pool)
        kept, handle = super().request_finished(request, block_ids)
        if not kept:
            self._leases.end(request.request_id, read=False)
        if handle is not None:
            handle[PREEMPTED] = request.num_preemptions
        return kept, handle

    # in a decode engine

    def _read_ahead(self, params: dict[str, Any]) -> None:
        source, skip, blocks = _source(params), params[AHEAD], params["remote_block_ids"][0]
        if skip < 0 or not self._can_read_ahead:
            self._ahead.drop(source, self.pool)
        elif piece := self._ahead.next_piece(source, skip, blocks, self.pool, time.perf_counter()):
            self._pieces.append((piece, params))

    def update_connector_output(self, connector_output: Any) -> None:
        """Update leases and pieces. vLLM frees the blocks of `finished_sending` after this call."""
        super().update_connector_output(connector_output)
        if report := connector_output.kv_connector_worker_meta:
            for name in report.expired:
                self._leases.end(name, read=False)
            for name in report.bad:
                self._ahead.invalidate(name)
            for name, ranks in report.ended.items():
                self._ahead.end_reads(name, ranks, self.pool)
        for name in connector_output.finished_sending or ():
            self._leases.end(name, read=True)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """With a count of None, vLLM asks again in the next step."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and _source(params) in self._ahead:
            if not self._ahead.is_reading(_source(params)):
                self._adopt(request, params)
            return None, False
        self._ahead.make_room(request.num_tokens / self.block_size + 1, self.pool)
        matched: tuple[int, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    def has_pending_push_work(self) -> bool:
        """Whether the engine must step on even without requests: only in a step does it learn that a read has ended."""
        return self._ahead.has_dropped or bool(super().has_pending_push_work())

    def _adopt(self, request: Any, params: dict[str, Any]) -> None:
        """Put the blocks that were read ahead into the prefix cache if they hold this prompt's KV."""
        found = self._ahead.take(_source(params), params["remote_block_ids"][0], self.pool)
        if found is None:
            return
        first, blocks = found
        if params.get(PREEMPTED) == 0:
            row = [self.pool.null_block] * first + blocks
            self.pool.cache_full_blocks(request, row, first, len(row), self.block_size, 0)
            params[ADOPTED] = len(blocks) * self.block_size
        self.pool.free_blocks(reversed(blocks))


def _source(params: dict[str, Any]) -> Source:
    return params["remote_engine_id"], params["remote_request_id"]
