import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve.records import Instance, ModelCard, Role, encode_record
from pdserve.registry import keys
from pdserve.registry.base import Registry
from pdserve.registry.view import RegistryView
from pdserve.supervisor import readiness
from pdserve.supervisor.readiness import RegisteredInstances
from tests.conditions import until
from tests.memory.registry import MemoryRegistry, MemoryServer

HERE = "10.0.0.1"
WORKER = Instance("decode-0-ab12cd34", Role.DECODE, model="demo", host=HERE, pid=4711)


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    async with MemoryRegistry(MemoryServer()) as entered:
        yield entered


async def register(registry: Registry, instance: Instance) -> None:
    await registry.put(keys.instance(instance), encode_record(instance))


async def test_waits_for_the_process_that_was_started(registry: Registry) -> None:
    """In a container that was killed and started again, processes have the pids of those of which the leases still
    live; two containers of one host have the same pids all the time."""
    await register(registry, Instance("decode-0-ffffffff", Role.DECODE, host=HERE, pid=WORKER.pid))
    async with RegistryView(registry) as view:
        waiting = asyncio.create_task(
            RegisteredInstances(registry, view, HERE).until_registered(WORKER.id, WORKER.pid)
        )
        await register(registry, Instance("decode-1-eeeeeeee", Role.DECODE, host=HERE, pid=WORKER.pid))
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        assert not done
        await register(registry, WORKER)
        assert await asyncio.wait_for(waiting, 30) == WORKER


async def test_removes_the_instance_and_its_card_alone(registry: Registry) -> None:
    other = Instance("decode-1-eeeeeeee", Role.DECODE, model="demo", host=HERE, pid=2)
    for instance in (WORKER, other):
        await register(registry, instance)
        await registry.put(keys.card("demo", instance.id), encode_record(ModelCard("demo", "demo")))
    async with RegistryView(registry) as view:
        await RegisteredInstances(registry, view, HERE).remove(WORKER)
    assert set(await registry.read("")) == {keys.instance(other), keys.card("demo", other.id)}


async def test_an_instance_counts_as_missing_after_long_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readiness, "CHECK_EVERY", 0.01)
    monkeypatch.setattr(readiness, "MISSING", 0.1)
    server = MemoryServer()
    async with MemoryRegistry(server) as ours, MemoryRegistry(server) as theirs, RegistryView(ours) as view:
        await register(theirs, WORKER)
        await until(lambda: bool(view.instances()))
        waiting = asyncio.create_task(RegisteredInstances(ours, view, HERE).until_missing(WORKER))
        assert not (await asyncio.wait([waiting], timeout=0.3))[0], "it is there"
        await server.down()
        assert not (await asyncio.wait([waiting], timeout=0.3))[0], "an outage tells nothing"
        await server.up(lose_data=True)
        assert not (await asyncio.wait([waiting], timeout=0.3))[0], "it registered again"
        await server.kill(theirs)
        assert await asyncio.wait_for(waiting, 30) >= 0.1


async def test_an_instance_that_unregisters_may_drain_for_its_drain_timeout(
    monkeypatch: pytest.MonkeyPatch, registry: Registry
) -> None:
    monkeypatch.setattr(readiness, "CHECK_EVERY", 0.01)
    monkeypatch.setattr(readiness, "MISSING", 0.1)
    async with RegistryView(registry) as view:
        waiting = asyncio.create_task(
            RegisteredInstances(registry, view, HERE, leaving=0.4).until_missing(WORKER)
        )
        assert not (await asyncio.wait([waiting], timeout=0.3))[0]
        assert await asyncio.wait_for(waiting, 30) >= 0.5


async def test_each_frontend_of_the_port_has_to_be_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them answers is chance: one that answers again and again says nothing about the other."""
    answers = iter(
        [("a", ""), ("a", ""), ("b", "no worker"), ("a", ""), ("", "refused"), ("b", ""), ("a", "")]
    )

    async def ask(*_: object) -> tuple[str, str]:
        return next(answers)

    monkeypatch.setattr(readiness, "_ask", ask)
    monkeypatch.setattr(readiness, "FRONTEND_CHECK_EVERY", 0.0)
    missing = [what async for what in readiness.until_frontends_ready("", 2)]
    assert missing == ["1 of 2 frontends have answered", "no worker", "refused"]
