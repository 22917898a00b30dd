import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve.messages import Instance, ModelCard, Role, encode_record
from pdserve.registry import connect, keys
from pdserve.registry.base import Registry
from pdserve.registry.view import View
from pdserve.supervisor.rollcall import RollCall

HERE = "10.0.0.1"
WORKER = Instance("decode-0-ab12cd34", Role.DECODE, model="demo", host=HERE, pid=4711)


@pytest.fixture
async def registry(namespace: str) -> AsyncIterator[Registry]:
    async with connect(f"memory://{namespace}", namespace) as entered:
        yield entered


async def register(registry: Registry, instance: Instance) -> None:
    await registry.put(keys.instance(instance), encode_record(instance))


async def test_waits_for_the_pid_on_this_machine(registry: Registry) -> None:
    async with View(registry) as view:
        waiting = asyncio.create_task(RollCall(registry, view, HERE).until(WORKER.pid))
        await register(registry, Instance("decode-0-ffffffff", Role.DECODE, host="10.0.0.2", pid=WORKER.pid))
        await register(registry, Instance("decode-1-eeeeeeee", Role.DECODE, host=HERE, pid=WORKER.pid + 1))
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        assert not done
        await register(registry, WORKER)
        assert await asyncio.wait_for(waiting, 5) == WORKER


async def test_strikes_off_the_instance_and_its_card_alone(registry: Registry) -> None:
    other = Instance("decode-1-eeeeeeee", Role.DECODE, model="demo", host=HERE, pid=2)
    for instance in (WORKER, other):
        await register(registry, instance)
        await registry.put(keys.card("demo", instance.id), encode_record(ModelCard("demo", "demo")))
    async with View(registry) as view:
        await RollCall(registry, view, HERE).strike_off(WORKER)
    assert set(await registry.read("")) == {keys.instance(other), keys.card("demo", other.id)}
