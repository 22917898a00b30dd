import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve.contract.records import Instance, ModelCard, Role, encode_record
from pdserve.registry import keys
from pdserve.registry.base import Registry
from pdserve.registry.view import RegistryView
from pdserve.supervisor.processes import readiness
from pdserve.supervisor.processes.readiness import RegisteredInstances
from pdserve.supervisor.processes.restarts import CannotStart
from tests.conditions import holds, until
from tests.memory.registry import MemoryRegistry, MemoryServer

HERE = "10.0.0.1"
WORKER = Instance("decode-0-ab12cd34", Role.DECODE, model="demo", host=HERE, pid=4711)


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    async with MemoryRegistry(MemoryServer()) as entered:
        yield entered


async def register(registry: Registry, instance: Instance) -> None:
    await registry.put(keys.instance(instance), encode_record(instance))


async def test_readiness_waits_for_the_started_process(registry: Registry) -> None:
    """A restarted container reuses pids while the old leases still live; two containers of one host have the same
    pids."""
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


async def test_remove_deletes_only_the_instance_and_its_card(registry: Registry) -> None:
    other = Instance("decode-1-eeeeeeee", Role.DECODE, model="demo", host=HERE, pid=2)
    for instance in (WORKER, other):
        await register(registry, instance)
        await registry.put(keys.card("demo", instance.id), encode_record(ModelCard("demo", "demo")))
    async with RegistryView(registry) as view:
        await RegisteredInstances(registry, view, HERE).remove(WORKER)
    assert set(await registry.read("")) == {keys.instance(other), keys.card("demo", other.id)}


async def test_an_instance_counts_as_missing_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draining process may run for `leaving` seconds after it has removed its record."""
    monkeypatch.setattr(readiness, "CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(readiness, "MISSING", 0.05)
    server = MemoryServer()
    async with MemoryRegistry(server) as ours, MemoryRegistry(server) as theirs, RegistryView(ours) as view:
        await register(theirs, WORKER)
        await until(lambda: bool(view.instances()))
        instances = RegisteredInstances(ours, view, HERE, leaving=0.05)
        waiting = asyncio.create_task(instances.until_missing(WORKER))
        await holds(lambda: not waiting.done(), 0.2)
        await server.down()  # an outage does not count
        await holds(lambda: not waiting.done(), 0.2)
        await server.up(lose_data=True)  # the worker registers again
        await holds(lambda: not waiting.done(), 0.2)
        await server.kill(theirs)
        assert await asyncio.wait_for(waiting, 30) >= 0.1


async def test_all_frontends_of_the_port_must_be_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which frontend answers is random: repeated answers of frontend a say nothing about frontend b."""
    answers = iter(
        [("a", ""), ("a", ""), ("b", "no worker"), ("a", ""), ("", "refused"), ("b", ""), ("a", "")]
    )

    async def ask(*_: object) -> tuple[str, str, bool]:
        return *next(answers), False

    monkeypatch.setattr(readiness, "_ask", ask)
    monkeypatch.setattr(readiness, "FRONTEND_CHECK_INTERVAL", 0.0)
    missing = [what async for what in readiness.until_frontends_ready("", 2)]
    assert missing == ["1 of 2 frontends have answered", "no worker", "refused"]


async def test_a_frontend_that_refuses_the_model_ends_the_start() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 No\r\nconnection: close\r\n\r\n")
        writer.write(b'{"frontend": "frontend-0-ab", "missing": "demo: too long", "refused": true}')
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(30):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(CannotStart, match=r"^frontend-0-ab refuses the model: demo: too long$") as raised:
            await anext(readiness.until_frontends_ready(url, 1))
    assert raised.value.exit_code == 2


async def test_frontends_are_checked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"frontend": "a"}')
        writer.close()

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(30):
            assert [what async for what in readiness.until_frontends_ready(url, 1)] == []
