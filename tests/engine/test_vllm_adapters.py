"""An adapter that vLLM loads in part. (Adapters that do not fit: `tests/conformance/parsers/test_adapters.py`.)"""

from types import SimpleNamespace

import pytest

from pdserve.contract.records import Role
from pdserve.engine.spec import EngineSpec
from pdserve.engine.vllm import api
from pdserve.engine.vllm.engine import VllmEngine
from pdserve.util.errors import ConfigError, EngineDead


class Core:
    """Registers an adapter and then fails to copy its weights, like vLLM if they do not fit the layers."""

    def __init__(self, *, removes: bool) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.registered: set[int] = set()
        self.removes = removes

    async def add_lora_async(self, request: api.LoRARequest) -> bool:
        self.registered.add(request.lora_int_id)
        raise RuntimeError("the size of tensor a (8) must match the size of tensor b (16)")

    async def remove_lora_async(self, id: int) -> bool:
        if not self.removes:
            raise RuntimeError("no")
        self.registered.discard(id)
        return True


async def test_an_engine_that_cannot_remove_a_partly_loaded_adapter_ends() -> None:
    engine = VllmEngine(EngineSpec(Role.DECODE, "decode-0-test", "demo"))
    engine._process.core = core = Core(removes=True)
    engine._process._core_process = SimpleNamespace(exitcode=None)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="size of tensor"):
        await engine.load_adapter(7, "/red")
    assert not core.registered
    core.removes = False
    with pytest.raises(EngineDead, match="adapter 7 was loaded in part and cannot be removed: no"):
        await engine.load_adapter(7, "/red")
