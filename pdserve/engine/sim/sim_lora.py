"""LoRA adapters of the simulated engine: a set of ids. An adapter changes the tokens and the KV."""

import asyncio
from collections import deque
from collections.abc import Mapping

from pdserve.config.lora_modules import adapter_capacity
from pdserve.engine.base import EngineFacts
from pdserve.engine.lora import AdapterEngine, with_adapter
from pdserve.engine.sim import wire
from pdserve.engine.sim.wire import CoreRequest, SimRequest
from pdserve.util.errors import Unavailable


class SimAdapters(AdapterEngine):
    facts: EngineFacts
    _waiting: deque[SimRequest]
    _pulling: dict[SimRequest, asyncio.Task[None]]
    _running: list[SimRequest]

    def __init__(self, engine_args: Mapping[str, object]) -> None:
        self.max_adapters = adapter_capacity(engine_args)
        self._adapters: set[int] = set()

    @property
    def requests(self) -> list[SimRequest]:
        return [*self._waiting, *self._running, *self._pulling]

    async def load_adapter(self, id: int, folder: str) -> None:
        self._adapters.add(id)

    async def unload_adapter(self, id: int) -> bool:
        if any(request.asked.adapter == id for request in self.requests):
            return False
        self._adapters.discard(id)
        return True

    def kv_fingerprint(self, body: list[bytes]) -> str:
        return self.fingerprint_of(wire.read_request(body))

    def fingerprint_of(self, request: CoreRequest) -> str:
        return with_adapter(self.facts.fingerprint, request.adapter)

    def read(self, body: list[bytes]) -> CoreRequest:
        """Raises ProtocolError, and Unavailable if the request's adapter is not loaded."""
        request = wire.read_request(body)
        if request.adapter and request.adapter not in self._adapters:
            raise Unavailable(f"adapter {request.adapter:x} is not loaded in this engine")
        return request
