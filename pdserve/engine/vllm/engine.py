"""The vLLM engine: EngineCore and its workers in processes of their own, driven by vLLM's `AsyncMPClient`."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import psutil

from pdserve.config.engine_args.arguments import SAMPLING_ARGUMENTS
from pdserve.contract.messages import KvHandle
from pdserve.contract.prefixes import PrefixKey
from pdserve.engine.base import Engine, EngineFacts, EngineUsage, Output, Step
from pdserve.engine.fingerprint import Fingerprint
from pdserve.engine.lora import with_adapter
from pdserve.engine.spec import EngineSpec
from pdserve.engine.vllm import api, translation
from pdserve.engine.vllm.cache import CacheMirror
from pdserve.engine.vllm.process import LEASE, VllmProcess
from pdserve.engine.vllm.translation import RunningRequest, RunningRequests
from pdserve.kv import COMPLETE, FAILED, RELEASED, STALLED, UNREACHABLE, side_channel
from pdserve.kv.handles import check_handle
from pdserve.util.errors import ConfigError, EngineDead, ProtocolError, Unavailable

logger = logging.getLogger(__name__)
T = TypeVar("T")

REACH_TIMEOUT = 5.0
"""Seconds for which `reach` waits for an answer, as a decode engine does."""
IDLE_AFTER = 0.5
"""Seconds without a report after which an engine without requests counts as holding no block."""


class VllmEngine(Engine):
    def __init__(self, spec: EngineSpec) -> None:
        self._process = VllmProcess(spec)
        self._fingerprint = Fingerprint(spec.model, spec.engine_args, api.VERSION)
        self._cache = CacheMirror()
        self.prefixes = self._cache.prefixes
        self._requests = RunningRequests()
        self._adapters: dict[int, api.LoRARequest] = {}
        self._usage = EngineUsage()
        self._reported = 0.0
        """Monotonic time of the engine's last report."""
        self._unread: dict[str, str] = {}
        """Request id -> why its KV could not be read; since the last step."""
        self._timestamp = 0.0
        """When the engine had the outputs of the last step."""
        self._uses_prefill_token = not SAMPLING_ARGUMENTS & spec.engine_args.keys()
        self._spans_hosts = spec.node is not None
        self._offloads = spec.kv_offload > 0

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        async with self._cache, AsyncExitStack() as stack:
            stack.push_async_callback(self._process.stop)
            await self._fingerprint.before()
            await self._process.start(self._cache.endpoint)
            self._cache.follow()
            self._stats = api.PrometheusStatLogger(self._process.config)
            self._stats.log_engine_initialized()
            self.facts = await self._facts()
            lora = self._process.config.lora_config
            self.max_adapters = lora.max_cpu_loras if lora is not None else 0
            self.prefixes.resize(self.facts.kv_blocks, self.facts.block_size)
            yield

    async def _facts(self) -> EngineFacts:
        config = self._process.config
        cache, scheduler = config.cache_config, config.scheduler_config
        host_blocks, disk_blocks = await self._tier_blocks()
        return EngineFacts(
            kv_blocks=cache.num_gpu_blocks,
            block_size=cache.block_size,
            max_model_len=config.model_config.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_batched_tokens=scheduler.max_num_batched_tokens,
            max_concurrency=cache.kv_cache_max_concurrency or 0.0,
            vllm_version=api.VERSION,
            supported_tasks=list(await self._call(self._core.get_supported_tasks_async())),
            fingerprint=await self._fingerprint.after(),
            host_blocks=host_blocks,
            disk_blocks=disk_blocks,
            side_channel=self._process.kv_address,
        )

    async def _tier_blocks(self) -> tuple[int, int]:
        """KV blocks that fit in host memory, and on disk."""
        if not self._offloads:
            return 0, 0
        ranks = await self._call(self._core.collective_rpc_async("pdserve_tier_blocks"))
        return min((host, disk) for host, disk in ranks)

    # the contract

    async def generate(
        self,
        request_id: str,
        prompt: list[int],
        body: list[bytes],
        kv: KvHandle | None,
        after: Sequence[int] = (),
    ) -> None:
        request = translation.to_generate(request_id, prompt, body, kv, after)
        adapter = self._set_adapter(request)
        if kv is not None:
            fingerprint = with_adapter(self.facts.fingerprint, adapter)
            check_handle(kv, len(prompt), self.facts.block_size, fingerprint)
        self._check_length(len(prompt) + len(after))
        pulls = kv is not None
        self._requests.add(RunningRequest(request_id, prompt, body, after, pulls=pulls, adapter=adapter))
        await self._call(self._core.add_request_async(request))

    async def prefill(self, request_id: str, prompt: list[int], body: list[bytes]) -> None:
        request, samples = translation.to_prefill(request_id, prompt, body, samples=self._uses_prefill_token)
        adapter = self._set_adapter(request)
        self._check_length(len(prompt))
        self._requests.add(
            RunningRequest(request_id, prompt, body, prefill=True, samples=samples, adapter=adapter)
        )
        await self._call(self._core.add_request_async(request))

    def first_output(
        self, request_id: str, prompt: list[int], body: list[bytes], packed: list[bytes]
    ) -> Output | None:
        """Every request of a prefill engine finishes after one token. The client's request finishes only if it stops at
        that token or may have no more."""
        raw = translation.first_output(packed, self._timestamp) if self._uses_prefill_token else None
        if raw is None:
            return None
        max_tokens = translation.read_body(body).sampling_params.max_tokens
        last = min(max_tokens, self.facts.max_model_len - len(prompt)) == 1
        if raw.finish_reason is api.FinishReason.LENGTH and not last:
            raw.finish_reason = None
        raw.request_id = request_id
        return Output(request_id, raw.new_token_ids, raw.finished, raw=raw)

    async def reject(self, kv: KvHandle) -> None:
        await self._call(self._core.add_request_async(translation.to_reject(kv)))

    async def read_ahead(self, kv: KvHandle, skip: int) -> None:
        ahead = translation.to_read_ahead(kv, skip // self.facts.block_size)
        await self._call(self._core.add_request_async(ahead))

    async def drop_ahead(self, kv: KvHandle) -> None:
        await self._call(self._core.add_request_async(translation.to_read_ahead(kv, -1)))

    async def limit_chunk(self, tokens: int) -> None:
        await self._call(self._core.add_request_async(translation.to_limit_chunk(tokens)))

    async def cancel(self, request_ids: list[str]) -> None:
        running = self._requests.of(request_ids)
        for request in running:
            self._requests.drop(request)
        if running:
            await self._call(self._core.abort_requests_async([request.engine_id for request in running]))

    async def step(self) -> Step:
        """Skip reports without outputs or transfers. The engine sends many while it waits for a transfer."""
        while True:
            outputs = await self._call(self._core.get_output_async())
            moved = await self._record_stats(outputs.scheduler_stats)
            if outputs.outputs or moved:
                self._timestamp = outputs.timestamp
                translated = [output for raw in outputs.outputs if (output := self._output(raw))]
                unread, self._unread = self._unread, {}
                return Step(
                    translated,
                    transfers=translation.transfers_of(moved) if moved else None,
                    unread=unread,
                    released=list(moved.get(RELEASED, ())),
                    unreachable=list(moved.get(UNREACHABLE, ())),
                    complete=[kv for params in moved.get(COMPLETE, ()) if (kv := self._partial(params))],
                    ended=outputs.timestamp,
                    prompt_tokens=translation.computed_prompt_tokens(outputs.scheduler_stats),
                )

    def pack(self, outputs: list[Output]) -> list[bytes]:
        return api.encode_outputs([output.raw for output in outputs], self._timestamp)

    def plain_body(self, max_tokens: int) -> list[bytes]:
        return translation.plain_body(max_tokens)

    def prefix_key(self, body: list[bytes]) -> PrefixKey | None:
        return translation.prefix_key(translation.read_body(body))

    async def load_adapter(self, id: int, folder: str) -> None:
        request = api.LoRARequest(f"{id:x}", id, folder)
        try:
            await self._call(self._core.add_lora_async(request))
        except EngineDead:
            raise
        except Exception as error:  # vLLM has no common class for unusable files
            await self._remove_partial(id)
            raise ConfigError([str(error)]) from error
        self._adapters[id] = request

    async def unload_adapter(self, id: int) -> bool:
        if self._requests.is_used(id):
            return False
        if self._adapters.pop(id, None) is not None:
            await self._call(self._core.remove_lora_async(id))
        return True

    def kv_fingerprint(self, body: list[bytes]) -> str:
        return with_adapter(self.facts.fingerprint, translation.adapter_of(translation.read_body(body)))

    @property
    def usage(self) -> EngineUsage:
        """The engine reports before it frees the last blocks, and repeatedly while a block is held. So without reports
        no block is held."""
        if not len(self._requests) and time.monotonic() > self._reported + IDLE_AFTER:
            return EngineUsage()
        return self._usage

    async def all_blocks_free(self) -> bool:
        free = bool(await self._call(self._core.reset_prefix_cache_async()))
        if free:
            self._cache.clear()  # the engine's event comes only with its next step
        return free

    async def watch(self) -> None:
        await self._process.watch()

    async def probe(self) -> None:
        """Ask the core or, if the engine spans hosts, all ranks, because the core does not notice a rank that hangs."""
        if self._spans_hosts:
            await self._call(self._core.collective_rpc_async("pdserve_answer"))
        else:
            await self._call(self._core.get_supported_tasks_async())

    async def reach(self) -> None:
        process = self._process
        await asyncio.to_thread(side_channel.ask, process.side_channel, REACH_TIMEOUT, process.channel_key)

    def cpu_seconds(self) -> float:
        return self._process.cpu_seconds()

    # inside

    @property
    def processes(self) -> set[psutil.Process]:
        return self._process.processes

    @property
    def _core(self) -> api.AsyncMPClient:
        """Raises EngineDead."""
        if self._process.core is None or self._process.dead:
            raise self._process.death()
        return self._process.core

    async def _call(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except Exception as error:
            if self._process.dead or isinstance(error, api.EngineDeadError):
                raise self._process.death() from error
            raise

    async def _remove_partial(self, id: int) -> None:
        """Remove an adapter that failed to load: vLLM registers it before it copies the weights, and would later take
        it for loaded. Raises EngineDead if vLLM cannot remove it."""
        try:
            await self._call(self._core.remove_lora_async(id))
        except Exception as error:
            raise EngineDead(f"adapter {id:x} was loaded in part and cannot be removed: {error}") from error

    def _set_adapter(self, request: api.EngineCoreRequest) -> int:
        """Set the request's adapter as loaded on this host; return its id, 0 for none."""
        if not (adapter := translation.adapter_of(request)):
            return 0
        if adapter not in self._adapters:
            raise Unavailable(
                f"adapter {request.lora_request.lora_name} ({adapter:x}) is not loaded in this engine"
            )
        request.lora_request = self._adapters[adapter]
        return adapter

    def _check_length(self, prompt_tokens: int) -> None:
        """vLLM checks this only in its frontend; a longer prompt would kill the engine."""
        if prompt_tokens >= self.facts.max_model_len:
            raise ProtocolError(
                f"a prompt of {prompt_tokens} tokens; the engine takes {self.facts.max_model_len - 1}"
            )

    def _output(self, raw: api.EngineCoreOutput) -> Output | None:
        request = self._requests.by_engine_id(raw.request_id)
        if request is None:
            return self._late_output(raw)
        params, raw.kv_transfer_params = raw.kv_transfer_params, None
        raw.request_id = request.request_id
        output = Output(request.request_id, raw.new_token_ids, raw.finished, raw=raw)
        if raw.finish_reason is api.FinishReason.ERROR and (raw.new_token_ids or not request.began):
            output.refused = translation.refusal(request.body, raw.new_token_ids)
        if raw.new_token_ids and not request.began:
            request.began = True
            output.begun = translation.scheduled_at(raw)
            output.recomputed = request.pulls and self._was_recomputed(raw.prefill_stats)
        if raw.finished:
            self._requests.drop(request)
            output.failed = raw.finish_reason in (api.FinishReason.ERROR, api.FinishReason.ABORT)
            if request.prefill and params and not output.failed:
                output.handle = self._handle(params, len(request.prompt), request.adapter)
        if request.prefill and not (request.samples and translation.is_whole_prompt(params, request.prompt)):
            output.tokens = []
        return output

    def _was_recomputed(self, stats: api.PrefillStats | None) -> bool:
        """Whether this engine computed more than the last block of a prompt whose KV was to be read."""
        computed = 0 if stats is None or stats.num_external_cached_tokens else stats.num_computed_tokens
        return bool(computed > self.facts.block_size)

    def _late_output(self, raw: api.EngineCoreOutput) -> Output | None:
        """The output of a cancelled request. A prefill that finished before vLLM saw the cancellation keeps its KV
        until the KV lease ends."""
        params = raw.kv_transfer_params
        if not params:
            return None
        handle = self._handle(params, params.get("remote_num_tokens", 0))
        return Output(raw.request_id, [], finished=True, handle=handle)

    def _handle(self, params: dict[str, Any], prompt_tokens: int, adapter: int = 0) -> KvHandle | None:
        return translation.handle_of(params, prompt_tokens, self.facts, LEASE, adapter)

    def _partial(self, params: dict[str, Any]) -> KvHandle | None:
        tokens = len(params["remote_block_ids"][0]) * self.facts.block_size
        request = self._requests.by_engine_id(params["remote_request_id"])
        return self._handle(params, tokens, request.adapter if request is not None else 0)

    async def _record_stats(self, stats: api.SchedulerStats | None) -> Mapping[str, Any]:
        """Record the usage; return what the KV connector reports of all ranks, which is mostly nothing."""
        if stats is None:
            return {}
        queued = stats.num_waiting_reqs
        waiting = queued + stats.num_skipped_waiting_reqs
        usage = EngineUsage(stats.num_running_reqs, waiting, queued, stats.kv_cache_usage)
        moved = stats.kv_connector_stats
        counted = stats.prefix_cache_stats.requests or stats.spec_decoding_stats
        if usage != self._usage or moved or counted:
            self._stats.record(stats, None)
        if self._offloads:
            moved = (moved or {}).get("PdserveConnector")
        self._usage, self._reported = usage, time.monotonic()
        for engine_id in (moved or {}).get(FAILED, ()):
            self._note_unread(self._requests.by_engine_id(engine_id), "the read failed")
        for engine_id in (moved or {}).get(STALLED, ()):
            await self._restart(engine_id)
        return moved or {}

    async def _restart(self, engine_id: str) -> None:
        """The read stalled: compute the prompt in other blocks. vLLM keeps the old blocks until the read has ended,
        because it may still write into them."""
        request = self._requests.by_engine_id(engine_id)
        if request is None:
            return
        self._note_unread(request, "the read stalled")
        self._requests.restart(request)
        logger.warning("request %s: the KV read stalled; prefilling locally", request.request_id)
        await self._call(self._core.abort_requests_async([engine_id]))
        again = translation.to_generate(request.engine_id, request.prompt, request.body, None, request.after)
        self._set_adapter(again)
        await self._call(self._core.add_request_async(again))

    def _note_unread(self, request: RunningRequest | None, why: str) -> None:
        """Keep the first reason, because several ranks may report a request."""
        if request is not None:
            self._unread.setdefault(request.request_id, why)
