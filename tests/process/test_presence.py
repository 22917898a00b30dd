"""What a process says of itself: which model card is the newest, and its instance."""

from pdserve.process.presence import Presence, generation
from pdserve.records import Instance, ModelCard, Role
from pdserve.registry.memory import MemoryRegistry, MemoryServer


def card(fingerprint: str, generation: int = 0, created: int = 0) -> ModelCard:
    return ModelCard("m", "/m", fingerprint=fingerprint, generation=generation, created=created)


def test_the_first() -> None:
    assert generation(card("a"), []) == 1


def test_what_is_there_already_is_no_newer() -> None:
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
        presence = Presence(registry, Instance("frontend-0", Role.FRONTEND), None)
        await server.down()
        await presence.announce()
        await server.up()
        assert list(await other.read("instances/")) == ["instances/frontend/frontend-0"]
        await presence.leave()
        assert await other.read("") == {}
