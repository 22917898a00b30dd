"""The registry's contract while the server is reachable, for both implementations."""

import asyncio

import pytest

from pdserve.registry.base import Change
from pdserve.registry.etcd import LEASE_TTL
from pdserve.util.errors import RegistryUnavailable
from tests.conditions import until
from tests.registry.conftest import Stage, following


async def test_keys_are_put_read_and_deleted(stage: Stage) -> None:
    async with stage.registry() as first, stage.registry() as other:
        await first.put("instances/decode/a", b"1")
        await first.put("instances/decode/b", b"2")
        await first.put("settings/x", b"3", leased=False)
        assert await other.read("instances/") == {"instances/decode/a": b"1", "instances/decode/b": b"2"}
        await other.put("settings/x", b"4", leased=False)
        await first.delete("instances/decode/a")
        await first.delete("instances/decode/absent")
        assert await other.read("") == {"instances/decode/b": b"2", "settings/x": b"4"}
        await other.delete("settings/x")
        assert await first.read("settings/") == {}


async def test_leased_keys_vanish_with_their_process(stage: Stage) -> None:
    async with stage.registry() as other, following(other) as seen:
        async with stage.registry() as first:
            await first.put("a", b"1")
            await first.put("b", b"2", leased=False)
            await seen.until({"a": b"1", "b": b"2"})
        await seen.until({"b": b"2"}, LEASE_TTL / 2)
        await other.delete("b")


async def test_a_leased_key_that_was_taken_away_is_written_again(stage: Stage) -> None:
    async with stage.registry() as other:

        async def until_there_is(state: dict[str, bytes]) -> None:
            async def there() -> bool:
                return await other.read("") == state

            await until(there)

        async with stage.registry() as first:
            for value in (b"1", b"2"):
                await first.put("a", value)
                await first.put("b", b"x")
                await other.delete("a")
                await until_there_is({"a": value, "b": b"x"})
                await other.put("b", b"y", leased=False)
                await until_there_is({"a": value, "b": b"x"})
            await first.delete("a")
            await until_there_is({"b": b"x"})
        await until_there_is({})


async def test_only_one_creator_of_a_key_succeeds(stage: Stage) -> None:
    async with stage.registry() as first, stage.registry() as other, following(other) as seen:
        both = [registry for registry in (first, other) for _ in range(5)]
        created = await asyncio.gather(*(each.create("a", b"%d" % n) for n, each in enumerate(both)))
        assert sum(created) == 1
        winner = created.index(True)
        await seen.until({"a": b"%d" % winner})
        await both[winner].delete("a")
        async with stage.registry() as third:
            assert await third.create("a", b"3")
            assert not await other.create("a", b"4")
            await seen.until({"a": b"3"})
        assert await first.create("a", b"5")
        await seen.until({"a": b"5"})


async def test_a_write_may_need_another_key_of_its_writer(stage: Stage) -> None:
    async with stage.registry() as first, stage.registry() as other:
        await first.create("held", b"1")
        await first.put("a", b"1", leased=False, holding="held")
        with pytest.raises(RegistryUnavailable):
            await other.put("a", b"2", leased=False, holding="held")
        await first.delete("held")
        with pytest.raises(RegistryUnavailable):
            await first.put("a", b"3", leased=False, holding="held")
        assert await first.read("") == {"a": b"1"}
        await first.delete("a")


async def test_a_watch_starts_with_the_present_keys(stage: Stage) -> None:
    async with stage.registry() as first:
        await first.put("in/a", b"1")
        await first.put("out/b", b"2")
        watch = first.watch("in/")
        assert await anext(watch) == [Change("in/a", b"1")]
        assert await anext(first.watch("none/")) == []


async def test_a_watch_sees_the_changes_below_its_prefix_in_order(stage: Stage) -> None:
    async with stage.registry() as first, stage.registry() as other, following(other, "in/") as seen:
        for number in range(50):
            await first.put("in/a", b"%d" % number)
            await first.put("out/a", b"x")
        await first.put("in/b", b"1")
        await first.delete("in/b")
        await first.put("in/c", b"1")
        await seen.until({"in/a": b"49", "in/c": b"1"})
        values = [int(change.value) for change in seen.changes if change.key == "in/a" and change.value]
        assert values == sorted(values)
        assert not [change for change in seen.changes if change.key.startswith("out")]


async def test_the_last_put_wins(stage: Stage) -> None:
    async with stage.registry() as first:
        await asyncio.gather(*(first.put("a", b"%d" % number) for number in range(20)))
        assert await first.read("a") == {"a": b"19"}


async def test_large_values_and_many_keys_are_read(stage: Stage) -> None:
    async with stage.registry() as first, stage.registry() as other:
        for number in range(8):
            await first.put(f"k/{number}", b"x" * 1_000_000)
        assert len(await other.read("k/")) == 8
        assert len(await anext(other.watch("k/"))) == 8
