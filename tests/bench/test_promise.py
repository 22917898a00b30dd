"""`pdserve bench promise`: arms of one graph, switched by its live settings."""

import asyncio
import json
from typing import Any

import pytest
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.options import rates_of
from pdserve_bench.promise.arms import OFF, WAYS, Arm, ArmsRun, Switch, arm_of, compare_arms, in_turn
from pdserve_bench.promise.result import report_of
from pdserve_bench.runs import PoissonRequests
from pdserve_bench.slo import Slo

from pdserve.cli import main
from pdserve.errors import ConfigError
from pdserve.registry import keys
from pdserve.settings import promise_of
from tests.bench.answers import OpenAi, tiny_server
from tests.memory.registry import MemoryRegistry, MemoryServer

CHAT = Slo(9.0, 0.25)


class Keeping(OpenAi):
    """Its second token comes too late for `CHAT`, unless that is promised."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__()
        self._reader = MemoryRegistry(server, "ns")

    async def _stream(self, body: Any, writer: asyncio.StreamWriter) -> None:
        async with self._reader as registry:
            found = await registry.read(keys.SETTINGS)
        live = {key.removeprefix(keys.SETTINGS): value.decode() for key, value in found.items()}
        self.gap = 0.0 if promise_of(live) else 0.5
        await super()._stream(body, writer)


def test_arms_come_forwards_and_then_backwards() -> None:
    chat = arm_of("chat", CHAT)
    assert [(rate, arm.name) for rate, arm in in_turn([2.0, 4.0], [OFF, chat])] == [
        (2.0, "off"), (2.0, "chat"), (4.0, "off"), (4.0, "chat"),
        (4.0, "chat"), (4.0, "off"), (2.0, "chat"), (2.0, "off"),
    ]  # fmt: skip


async def test_settings_of_an_arm_go_with_it_and_the_earlier_ones_come_back() -> None:
    async with MemoryRegistry(MemoryServer(), "ns") as registry:
        before = {"router": "kv", "slo-ttft": "9s"}
        for name, value in before.items():
            await registry.put(keys.setting(name), value.encode(), leased=False)

        async def live() -> dict[str, str]:
            found = await registry.read(keys.SETTINGS)
            return {key.removeprefix(keys.SETTINGS): value.decode() for key, value in found.items()}

        async with Switch.on(registry) as switch:
            await switch.to(arm_of("chat", Slo(0.5, 0.06)))
            assert await live() == {"router": "kv", "slo-ttft": "500ms", "slo-gap": "60ms"}
            await switch.to(WAYS[0])
            assert (await live())["max-local-prefill-length"] == "0"
            assert (await live())["slo-ttft"] == "off"
            await switch.to(OFF)
            assert await live() == {"router": "kv", "slo-ttft": "off", "slo-gap": "off"}
        assert await live() == before


async def test_settings_come_back_also_after_ctrl_c() -> None:
    async with MemoryRegistry(MemoryServer(), "ns") as registry:
        entered = asyncio.Event()

        async def work() -> None:
            async with Switch.on(registry) as switch:
                await switch.to(arm_of("chat", CHAT))
                entered.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await entered.wait()
        assert await registry.read(keys.SETTINGS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not await registry.read(keys.SETTINGS)


async def test_each_arm_is_judged_by_the_promise() -> None:
    server = MemoryServer()
    arms = [OFF, arm_of("chat", CHAT)]
    result = ArmsRun({"chat": CHAT}, [20.0], arms, 1.0, seed=4, shortest=1.0, warm_up=0.5)
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


def test_without_a_promise_the_default_is_set_against_both_ways() -> None:
    result = ArmsRun({"chat": CHAT}, [1.0], [OFF, *WAYS], 1.0, seed=1)
    assert report_of(result, "test").data["arms"].keys() == {"off", "all remote", "all local"}
    assert Arm("off", {}) == OFF


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--promise chat=500ms", "write it as chat=500ms/60ms"),
        ("--promise =1s/1s", "write it as chat=500ms/60ms"),
        ("--promise off=1s/1s", "write it as chat=500ms/60ms"),
        ("--rates fast", "--rates fast: give numbers above 0"),
        ("--rates 0,4", "--rates 0,4: give numbers above 0"),
    ],
)
def test_a_wrong_command_line_is_refused_at_once(
    options: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "promise", *options.split()]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("text", ["ten", "10,", "0", "10,-2"])
def test_rates(text: str) -> None:
    with pytest.raises(ConfigError, match="--rates"):
        rates_of("--rates", text)
    assert rates_of("--rates", "20, 10") == [10, 20]
