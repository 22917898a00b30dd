"""The real engine: vLLM's EngineCore and workers in processes of their own, driven through its own core client."""

import asyncio
import json
import logging
import os
import secrets
from types import TracebackType
from typing import Any, Self

import psutil

from pdserve.config.arguments import to_argv
from pdserve.engine import vllm_api as api
from pdserve.engine.base import Engine, EngineFacts, EngineUsage, Output, Step, Transfers
from pdserve.engine.handles import check_handle
from pdserve.engine.ports import free_port, require_free
from pdserve.engine.spec import EngineSpec
from pdserve.engine.vllm_cache import CacheMirror
from pdserve.engine.vllm_requests import (
    handle_of,
    read_body,
    remote_ok,
    to_generate,
    to_prefill,
    to_reject,
)
from pdserve.engine.vllm_tickets import Ticket, Tickets
from pdserve.errors import EngineDead, ProtocolError
from pdserve.messages import KvHandle, Role

log = logging.getLogger(__name__)

LEASE = 30
"""seconds that the prefill side keeps blocks for the decode side"""
STALLED = "pdserve_stalled_requests"
"""as `pdserve.kv.connector` names it; not imported from there, since that is vLLM's process's business"""
SHUTDOWN_TIMEOUT = 10.0
"""seconds that the engine's processes get to end before they are killed"""


class VllmEngine(Engine):
    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._cache = CacheMirror()
        self._tickets = Tickets()
        self._usage = EngineUsage()
        self._timestamp = 0.0
        self._core: api.AsyncMPClient | None = None

    async def __aenter__(self) -> Self:
        await self._cache.__aenter__()
        try:
            self._set_environment()
            self._config = api.engine_config(self._argv())
            self._core = await asyncio.to_thread(api.start_core, self._config)
            self._cache.follow(self._config)
            self._stats = api.PrometheusStatLogger(self._config)
            self._stats.log_engine_initialized()
            self.facts = await self._facts()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """However far the start came, and whatever state the engine is in: its processes are gone afterwards."""
        if self._core is not None:
            await asyncio.to_thread(self._core.shutdown, SHUTDOWN_TIMEOUT)
        _kill_children()
        await self._cache.__aexit__(kind, error, trace)

    def _set_environment(self) -> None:
        """Read by vLLM here and in its processes, which are spawned: forking a process with threads is not safe."""
        port = self._spec.kv_port or free_port(self._spec.host)
        require_free(self._spec.host, port)
        os.environ |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self._spec.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        # seeds the hashes that name KV blocks, where vLLM does not seed them itself: equal in its processes and here
        os.environ.setdefault("PYTHONHASHSEED", str(secrets.randbelow(2**32)))

    def _argv(self) -> list[str]:
        spec = self._spec
        arguments: dict[str, object] = {"model": spec.model}
        if spec.served_model_name:
            arguments["served-model-name"] = [spec.served_model_name]
        if spec.disaggregated:
            arguments["kv-transfer-config"] = {
                "kv_connector": "PdserveConnector",
                "kv_connector_module_path": "pdserve.kv.connector",
                "kv_role": "kv_producer" if spec.role is Role.PREFILL else "kv_consumer",
                "engine_id": spec.instance,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"kv_lease_duration": LEASE},
            }
        if spec.role is Role.DECODE:
            arguments["kv-events-config"] = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self._cache.endpoint,
            }
        return to_argv({**spec.engine_args, **arguments})

    async def _facts(self) -> EngineFacts:
        cache, scheduler = self._config.cache_config, self._config.scheduler_config
        blocks = cache.num_gpu_blocks
        return EngineFacts(
            kv_blocks=blocks,
            block_size=cache.block_size,
            max_model_len=self._config.model_config.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_batched_tokens=scheduler.max_num_batched_tokens,
            max_concurrency=cache.kv_cache_max_concurrency or 0.0,
            vllm_version=api.VERSION,
            supported_tasks=list(await self._alive.get_supported_tasks_async()),
        )
