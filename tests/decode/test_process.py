"""The workers' processes, on a real etcd, a real NATS and TCP streams, with simulated engines."""

import asyncio
import os
import signal
from dataclasses import replace

import httpx
import pytest

from pdserve import registry, stream
from pdserve.config.schema import Config, DecodeConfig, PrefillConfig
from pdserve.messages import Failed, Outputs, Placed, Submit
from pdserve.plan.slots import Slot
from pdserve.process.life import live
from pdserve.records import Instance, Role
from pdserve.registry.view import RegistryView
from tests.conditions import until
from tests.decode.graph import config
from tests.engine.sims import body, decode_outputs

ARGUMENTS = {"block-size": 16, "max-model-len": 2048}


@pytest.fixture
def graph(nats_url: str, etcd_url: str, namespace: str) -> Config:
    decode = DecodeConfig(
        engine="sim", engine_args=ARGUMENTS, remote_prefill=True, max_local_prefill_length=64
    )
    return replace(
        config(decode),
        prefill=PrefillConfig(engine="sim", engine_args=ARGUMENTS),
        nats=nats_url,
        etcd=etcd_url,
        namespace=namespace,
    )


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_sigterm_ends_a_worker_and_its_records(graph: Config, role: Role) -> None:
    assert graph.etcd is not None
    async with registry.connect(graph.etcd, graph.namespace) as connection, RegistryView(connection) as view:
        life = asyncio.ensure_future(live(graph, Slot(role, 0)))
        await until(lambda: bool(view.instances(role)) or life.done())
        (instance,) = view.instances(role)
        assert instance.id.startswith(f"{role.value}-0-")
        async with httpx.AsyncClient() as client:
            assert "pdserve_prefill_total" in (await client.get(instance.metrics)).text
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(life, 10)
        await until(lambda: not view.instances() and not view.cards())


async def test_a_request_through_all_the_real_seams(graph: Config) -> None:
    assert graph.etcd is not None
    lives = [
        asyncio.ensure_future(live(graph, Slot(Role.PREFILL, 0))),
        asyncio.ensure_future(live(graph, Slot(Role.DECODE, 0))),
    ]
    try:
        async with (
            registry.connect(graph.etcd, graph.namespace) as connection,
            RegistryView(connection) as view,
        ):
            await until(lambda: len(view.instances()) == 2, within=15)
            (instance,) = view.instances(Role.DECODE)
            placed, tokens = await ask(instance, "r0", 3)
            for number in range(1, 20):  # the decode worker may hear of the prefill worker after we do
                if placed.prefill == "remote":
                    break
                placed, tokens = await ask(instance, f"r{number}", 3 + number)
            assert (placed.prefill, placed.reason) == ("remote", "long")
            assert len(tokens) == 6
    finally:
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)


async def ask(instance: Instance, request_id: str, first: int) -> tuple[Placed, list[int]]:
    placed: Placed | None = None
    tokens: list[int] = []
    async with asyncio.timeout(15), stream.connect(instance.address, f"frontend-{request_id}") as client:
        await client.send(Submit(request_id, list(range(first, first + 500)), 30.0, body(6)))
        async for message in client.received():
            match message:
                case Placed():
                    placed = message
                case Outputs(frames):
                    for output in decode_outputs(frames).outputs:
                        tokens += output.new_token_ids
                        if output.finish_reason is not None:
                            assert placed is not None
                            return placed, tokens
                case Failed():
                    pytest.fail(message.message)
    raise AssertionError
