"""LoRA adapters in vLLM's app: the model names that it accepts, and its routes that load and unload adapters."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Any

from vllm.config import LoRAConfig
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.lora import api_router
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.lora.request import LoRARequest

from pdserve.contract.records import Adapter
from pdserve.frontend.vllm.lora_adapters import AdapterStore
from pdserve.runtime.tasks import run_on_loop
from pdserve.util.errors import BadRequest, Unavailable

LONGEST_NAME, LONGEST_PATH = 256, 4096
"""Bytes. The workers' reports on an adapter must fit into their records in etcd."""
Route = Callable[..., Awaitable[ErrorResponse | str]]


class AppAdapters:
    """The adapters of one model in its app. `set` replaces the list. The routes keep vLLM's checks, responses and
    errors; `store` loads and unloads on the workers. Replaces private parts of vLLM's OpenAIServingModels and engine
    client."""

    def __init__(self, models: OpenAIServingModels, model: str, store: AdapterStore | None) -> None:
        self.refresh: Callable[[], None] = lambda: None
        """calls `set` with the registry's current adapters"""
        self._models = models
        self._model = model
        self._store = store
        self._home = asyncio.get_running_loop()
        api_router.router.routes.clear()  # the app has its routes now; the next model's app would get them twice
        self._loads, self._unloads = models.load_lora_adapter, models.unload_lora_adapter
        # without a configuration, the input processor refuses adapters
        models.engine_client.input_processor.lora_config = LoRAConfig()
        models.engine_client.add_lora = self._add
        models.load_lora_adapter, models.unload_lora_adapter = map(self._route, (self._load, self._unload))

    def set(self, adapters: Iterable[Adapter]) -> None:
        requests = {each.name: LoRARequest(each.name, each.id, each.path) for each in adapters}
        self._models.lora_requests = requests

    async def _add(self, asked: LoRARequest) -> bool:
        """Called by vLLM's route to load an adapter."""
        assert self._store is not None
        await self._store.load(self._model, asked.lora_name, asked.lora_path)
        return True

    def _route(self, work: Route) -> Route:
        """Run a route on the frontend's loop, also if called on the side loop, and return errors in vLLM's form."""

        async def at_home(request: Any) -> ErrorResponse | str:
            try:
                return await work(request)
            except (BadRequest, Unavailable) as error:
                kind = "InvalidUserInput" if isinstance(error, BadRequest) else "ServiceUnavailableError"
                return create_error_response(str(error), kind, HTTPStatus(error.status))
            finally:
                self.refresh()

        return lambda request: run_on_loop(self._home, at_home(request))

    async def _load(self, request: LoadLoRAAdapterRequest) -> ErrorResponse | str:
        _check_lengths(request)
        assert self._store is not None
        async with self._store.claimed(self._model, request.lora_name):
            self.refresh()  # vLLM refuses known names
            answer: ErrorResponse | str = await self._loads(request)
            self.refresh()  # replaces vLLM's own adapter id, which no worker knows
        return answer

    async def _unload(self, request: UnloadLoRAAdapterRequest) -> ErrorResponse | str:
        assert self._store is not None
        answer: ErrorResponse | str = await self._unloads(request)
        if not isinstance(answer, ErrorResponse):
            await self._store.unload(self._model, request.lora_name)
        return answer


def _check_lengths(request: LoadLoRAAdapterRequest) -> None:
    texts = (("lora_name", request.lora_name, LONGEST_NAME), ("lora_path", request.lora_path, LONGEST_PATH))
    for key, text, longest in texts:
        if (size := len(text.encode())) > longest:
            raise BadRequest(f"'{key}' has {size:,} bytes, but may have {longest:,}.", key)
