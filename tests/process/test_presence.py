"""The registry records of a process: generations of model cards, and the instance."""

import pytest

from pdserve import __version__
from pdserve.contract.records import WIRE, Instance, ModelCard, Role, decode_instance, encode_record
from pdserve.process.presence import Presence, generation, refusal
from pdserve.registry import keys
from pdserve.registry.view import RegistryView
from pdserve.runtime.tasks import TaskOwner
from tests.conditions import until
from tests.memory.registry import MemoryRegistry, MemoryServer


def card(fingerprint: str, generation: int = 0, created: int = 0) -> ModelCard:
    return ModelCard("m", "/m", fingerprint=fingerprint, generation=generation, created=created)


@pytest.mark.parametrize(
    ("own", "registered", "expected"),
    [
        (card("a"), [], 1),
        (card("a", created=99), [card("a", 3), card("b", 4)], 3),
        (card("c"), [card("a", 3, created=10**12), card("b", 4)], 5),
        (card("a"), [card("b", 4)], 5),
    ],
    ids=[
        "the first",
        "like a registered card",
        "a change is newer than all",
        "a return to older weights is newer, too",
    ],
)
def test_a_changed_card_gets_a_newer_generation(
    own: ModelCard, registered: list[ModelCard], expected: int
) -> None:
    assert generation(own, registered) == expected


async def test_a_frontend_announces_itself_during_an_outage_of_the_registry() -> None:
    """A worker that warmed up also deletes its key in `newcomers/`, which needs etcd. A frontend has no such key."""
    server = MemoryServer()
    async with MemoryRegistry(server, "t") as registry, MemoryRegistry(server, "t") as other:
        mine = Presence(registry, Instance("frontend-0", Role.FRONTEND), None)
        await server.down()
        await mine.announce()
        await server.up()
        ((key, record),) = (await other.read("instances/")).items()
        assert key == "instances/frontend/frontend-0"
        said = decode_instance(record)
        assert (said.version, said.wire) == (__version__, WIRE)
        await mine.leave()
        assert await other.read("") == {}


OLD = Instance("decode-0-old", Role.DECODE, version="0.0.7", wire=WIRE - 2)


async def test_a_process_with_an_incompatible_wire_waits() -> None:
    server = MemoryServer()
    async with (
        MemoryRegistry(server, "t") as old,
        MemoryRegistry(server, "t") as registry,
        RegistryView(old) as view,
        TaskOwner() as tasks,
    ):
        await old.put(keys.instance(OLD), encode_record(OLD))
        mine = Presence(registry, Instance("decode-1-new", Role.DECODE, host="h"), None)
        joining = tasks.start(mine.wait_until_compatible(), "joining")
        await until(lambda: bool(view.slots()))
        (refused,) = view.slots()
        assert (refused.name, refused.host, refused.state) == ("decode-1-new", "h", "refused")
        assert (
            f"pdserve {__version__} (wire {WIRE}) cannot work beside decode-0-old of pdserve 0.0.7"
            in refused.cause
        )
        assert not joining.done()
        await old.delete(keys.instance(OLD))
        await until(lambda: joining.done() and not view.slots())


def test_builds_with_a_distant_wire_are_refused() -> None:
    assert (
        refusal([Instance("decode-0-a", Role.DECODE, wire=wire) for wire in (WIRE - 1, WIRE, WIRE + 1)]) == ""
    )
    many = [Instance(f"decode-{number}-a", Role.DECODE, wire=WIRE + 2) for number in range(3)]
    assert "beside decode-0-a and 2 more of pdserve" in refusal(many)
