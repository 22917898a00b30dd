"""What a process says of itself: which model card is the newest, and its instance."""

import pytest

from pdserve.process import presence
from pdserve.process.presence import Presence, generation
from pdserve.records import Instance, ModelCard, Role
from pdserve.registry.view import RegistryView
from pdserve.tasks import Owner
from tests.conditions import until
from tests.memory.registry import MemoryRegistry, MemoryServer


def card(fingerprint: str, generation: int = 0, created: int = 0) -> ModelCard:
    return ModelCard("m", "/m", fingerprint=fingerprint, generation=generation, created=created)


def test_the_first() -> None:
    assert generation(card("a"), []) == 1


def test_a_card_like_a_present_one_has_its_generation() -> None:
    there = [card("a", 3), card("b", 4)]
    assert generation(card("a", created=99), there) == 3
    assert generation(card("b"), there) == 4


def test_a_change_is_newer_than_all_that_is_there() -> None:
    assert generation(card("c"), [card("a", 3, created=10**12), card("b", 4)]) == 5
    assert generation(card("a"), [card("b", 4)]) == 5, "and so is going back"


async def test_a_frontend_announces_itself_also_while_the_registry_is_away() -> None:
    """It was never a newcomer: there is nothing to delete."""
    server = MemoryServer()
    async with MemoryRegistry(server, "t") as registry, MemoryRegistry(server, "t") as other:
        mine = Presence(registry, Instance("frontend-0", Role.FRONTEND), None)
        await server.down()
        await mine.announce()
        await server.up()
        assert list(await other.read("instances/")) == ["instances/frontend/frontend-0"]
        await mine.leave()
        assert await other.read("") == {}


async def test_a_prefill_worker_says_in_its_instance_that_it_has_lost_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "INTERVAL", 0.01)
    lost = False
    server = MemoryServer()
    async with MemoryRegistry(server, "t") as registry, RegistryView(registry) as view, Owner() as tasks:
        mine = Presence(registry, Instance("prefill-0", Role.PREFILL), None, lambda: lost)
        tasks.forever(mine.keep_current, "instance record")
        await mine.announce()
        for lost in (False, True, False):
            await until(lambda: [each.queue_lost for each in view.instances()] == [lost])  # noqa: B023
