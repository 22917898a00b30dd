"""Adapters that vLLM refuses, by an engine core in this process that keeps them as vLLM's does."""

from types import SimpleNamespace

import pytest

from pdserve.engine.spec import EngineSpec
from pdserve.engine.vllm import api
from pdserve.engine.vllm.engine import VllmEngine
from pdserve.errors import ConfigError, EngineDead
from pdserve.records import Role


class Core:
    """vLLM registers an adapter, then copies its weights into the layers; what is registered is not copied again."""

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.registered: set[int] = set()
        self.fits = self.removes = True

    async def add_lora_async(self, request: api.LoRARequest) -> bool:
        if request.lora_int_id not in self.registered:
            self.registered.add(request.lora_int_id)
            if not self.fits:
                raise RuntimeError("the size of tensor a (8) must match the size of tensor b (16)")
        return True

    async def remove_lora_async(self, id: int) -> bool:
        if not self.removes:
            raise RuntimeError("no")
        self.registered.discard(id)
        return True


def engine_with(core: Core) -> VllmEngine:
    engine = VllmEngine(EngineSpec(Role.DECODE, "decode-0-test", "demo"))
    engine._process.core = core
    return engine


async def test_an_adapter_that_does_not_fit_is_refused_each_time_and_takes_no_place() -> None:
    core = Core()
    engine = engine_with(core)
    core.fits = False
    for _ in range(2):
        with pytest.raises(ConfigError, match="size of tensor"):
            await engine.load_adapter(7, "/red")
        assert not core.registered
    core.fits = True
    await engine.load_adapter(7, "/red")
    assert core.registered == {7}


async def test_an_engine_that_keeps_half_an_adapter_ends() -> None:
    core = Core()
    core.fits = core.removes = False
    with pytest.raises(EngineDead, match="adapter 7 was loaded in part and cannot be removed: no"):
        await engine_with(core).load_adapter(7, "/red")
