"""`pdserve bench promise` compares values of live settings ("arms") in one graph."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.measure.runs import PoissonRequests
from pdserve_bench.measure.slo import Slo
from pdserve_bench.promise import arms
from pdserve_bench.promise.arms import OFF, WAYS, ArmsRun, Switch, arm_of, compare_arms
from pdserve_bench.promise.result import report_of

from pdserve.contract.live_settings import parse_slo
from pdserve.registry import keys
from tests.bench.answers import OpenAi, tiny_server
from tests.memory.registry import MemoryRegistry, MemoryServer

CHAT = Slo(9.0, 0.25)


class Keeping(OpenAi):
    """A server that breaks the gap of `CHAT`, unless an SLO is set."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__()
        self._reader = MemoryRegistry(server, "ns")

    async def _stream(self, body: Any, writer: asyncio.StreamWriter) -> None:
        async with self._reader as registry:
            found = await registry.read(keys.SETTINGS)
        live = {key.removeprefix(keys.SETTINGS): value.decode() for key, value in found.items()}
        self.gap = 0.0 if parse_slo(live) else 0.5
        await super()._stream(body, writer)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry in memory applies new settings at once."""
    monkeypatch.setattr(arms, "SETTLED", 0.0)


async def test_an_arms_settings_end_with_the_arm_and_earlier_ones_are_restored() -> None:
    async with MemoryRegistry(MemoryServer(), "ns") as registry:
        before = {"router": "kv", "slo-ttft": "9s"}
        for name, value in before.items():
            await registry.put(keys.setting(name), value.encode(), leased=False)

        async def live() -> dict[str, str]:
            found = await registry.read(keys.SETTINGS)
            return {key.removeprefix(keys.SETTINGS): value.decode() for key, value in found.items()}

        with suppress(KeyError):
            async with Switch.on(registry) as switch:
                await switch.to(arm_of("chat", Slo(0.5, 0.06)))
                assert await live() == {"router": "kv", "slo-ttft": "500ms", "slo-gap": "60ms"}
                await switch.to(WAYS[0])
                assert (await live())["max-local-prefill-length"] == "0"
                assert (await live())["slo-ttft"] == "off"
                await switch.to(OFF)
                assert await live() == {"router": "kv", "slo-ttft": "off", "slo-gap": "off"}
                raise KeyError
        assert await live() == before


async def test_each_arm_is_judged_by_the_promise() -> None:
    server = MemoryServer()
    result = ArmsRun(
        {"chat": CHAT}, [20.0], [OFF, arm_of("chat", CHAT)], 1.0, seed=4, shortest=1.0, warm_up=0.5
    )
    async with (
        MemoryRegistry(server, "ns") as registry,
        Switch.on(registry) as switch,
        tiny_server(Keeping(server)) as tiny,
    ):
        users = PoissonRequests(Prompts(1.0, 7), 20, 2)
        await compare_arms(Endpoint(tiny.url, "tiny"), users, switch, result)
    assert [arm.name for arm, _ in result.windows] == ["off", "chat", "chat", "off"]
    found = json.loads(report_of(result, "test").as_json())
    off, on = found["data"]["cells"]
    assert off["requests"] == on["requests"] > 20, "the same arrivals"
    assert (off["kept"], off["broke gap"]) == (0, off["requests"])
    assert on["kept"] == on["requests"]
    assert off["finish p50"] > on["finish p50"]
    assert "chat: off under 20, on over 20" in found["lead"]
    assert [row[1] for row in found["tables"][0]["rows"]] == ["off", "on"]
    assert found["complete"]
