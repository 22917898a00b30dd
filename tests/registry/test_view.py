from collections.abc import AsyncIterator

from msgspec.structs import replace

from pdserve.contract.records import Instance, ModelCard, Role, SlotState, encode_record
from pdserve.registry import keys
from pdserve.registry.base import Change
from pdserve.registry.view import RegistryView
from tests.conditions import until
from tests.memory.registry import MemoryRegistry, MemoryServer
from tests.registry.conftest import Stage

DECODE = Instance("decode-0-a", Role.DECODE, "org/model 1.5")
PREFILL = Instance("prefill-0-b", Role.PREFILL, "org/model 1.5", draining=True)
FRONTEND = Instance("frontend-0-c", Role.FRONTEND)
SLOT = SlotState("decode-0", Role.DECODE)
CARD = ModelCard("org/model 1.5", "/models/m", {"max-model-len": 4096})


async def test_the_view_follows_changes(stage: Stage) -> None:
    async with stage.registry() as registry:
        await registry.put(keys.instance(DECODE), encode_record(DECODE))
        async with RegistryView(registry) as view, stage.registry() as other:
            assert view.instances() == [DECODE]
            for instance in (PREFILL, FRONTEND):
                await other.put(keys.instance(instance), encode_record(instance))
            await other.put(keys.card(CARD.name, PREFILL.id), encode_record(CARD))
            await other.put(keys.setting("router"), b"kv", leased=False)
            await until(lambda: len(view.instances()) == 3 and "router" in view.settings())
            assert view.instances(role=Role.PREFILL) == [PREFILL]
            assert view.instances(model="org/model 1.5") == [DECODE, PREFILL]
            assert view.instances(Role.DECODE, "else") == []
            assert view.cards() == {"org/model 1.5": [(PREFILL.id, CARD)]}
            assert view.settings() == {"router": "kv"}
            await other.delete(keys.setting("router"))
            await other.__aexit__(None, None, None)
            await until(lambda: view.instances() == [DECODE] and not view.cards() and not view.settings())


async def test_a_lost_process_is_reported(stage: Stage) -> None:
    """A drained process is not reported, nor is a lost one that has returned."""
    async with stage.registry() as registry, RegistryView(registry) as view:
        for instance in (DECODE, PREFILL, FRONTEND):
            await registry.put(keys.instance(instance), encode_record(instance))
        await until(lambda: len(view.instances()) == 3)
        for instance in (DECODE, PREFILL, FRONTEND):
            await registry.delete(keys.instance(instance))
        await until(lambda: not view.instances())
        assert [each.id for each in view.lost_processes()] == [DECODE.id, FRONTEND.id]
        await registry.put(keys.instance(DECODE), encode_record(DECODE))
        await until(lambda: bool(view.instances()))
        assert [each.id for each in view.lost_processes()] == [FRONTEND.id]


async def test_a_lost_worker_is_reported_until_another_replaces_it() -> None:
    """The replacement may be on another host. A worker that was already registered replaces none."""
    server = MemoryServer()
    workers = [replace(DECODE, id=f"decode-0-{name}", host=name) for name in "abc"]

    async def put(worker: Instance) -> None:
        await writer.put(keys.instance(worker), encode_record(worker))

    async with MemoryRegistry(server) as writer, MemoryRegistry(server) as registry:
        await put(workers[0])
        await put(workers[1])
        async with RegistryView(registry) as view:
            await writer.delete(keys.instance(workers[0]))
            await until(lambda: bool(view.lost_processes()))
            assert [(each.id, each.host, each.model) for each in view.lost_processes()] == [
                ("decode-0-a", "a", DECODE.model)
            ]
            assert not +view.replaced
            await put(workers[2])
            await until(lambda: not view.lost_processes())
            assert view.replaced == {(DECODE.model, Role.DECODE): 1}
            await put(replace(workers[1], draining=True))
            await until(lambda: any(worker.draining for worker in view.instances()))
            await writer.delete(keys.instance(workers[1]))
            await until(lambda: len(view.instances()) == 1)
            assert view.lost_processes() == []


class WatchedAnew(MemoryRegistry):
    """A registry whose first watch fails at the first change."""

    watches = 0

    async def watch(self, *prefixes: str) -> AsyncIterator[list[Change]]:
        self.watches += 1
        watch = super().watch(*prefixes)
        yield await anext(watch)
        async for changes in watch:
            if self.watches == 1:
                raise RuntimeError("a bug")
            yield changes


async def test_a_restarted_watch_forgets_deleted_keys() -> None:
    server = MemoryServer()
    records = {
        keys.instance(DECODE): encode_record(DECODE),
        keys.newcomer(DECODE): encode_record(DECODE),
        keys.card(CARD.name, DECODE.id): encode_record(CARD),
        keys.setting("router"): b"kv",
        keys.slot(SLOT): encode_record(SLOT),
    }
    async with MemoryRegistry(server) as writer, WatchedAnew(server) as registry:
        for key, value in records.items():
            await writer.put(key, value)
        async with RegistryView(registry) as view:

            def seen() -> list[object]:
                newcomers = view.newcomers(Role.DECODE, "org/model 1.5")
                return [view.instances(), newcomers, view.cards(), view.settings(), view.slots()]

            assert all(seen())
            for key in records:
                await writer.delete(key)
            await until(lambda: registry.watches == 2 and not any(seen()))
            assert [each.id for each in view.lost_processes()] == [DECODE.id], (
                "a worker that vanished meanwhile is lost"
            )
