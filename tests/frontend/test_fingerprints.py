"""A rolling change of what a model's workers have loaded, as the frontend goes through it."""

import asyncio

import pytest

from tests.conditions import until
from tests.frontend.conftest import Graph
from tests.frontend.test_generate import completion

pytestmark = pytest.mark.asyncio(loop_scope="session")


def ask(graph: Graph) -> "asyncio.Task[int]":
    async def post() -> int:
        answer = await graph.http.post("/v1/completions", json=completion(model="rolled", max_tokens=6))
        return answer.status_code

    return asyncio.create_task(post())


async def test_new_requests_go_to_the_newest_and_old_ones_stay(graph: Graph) -> None:
    async with graph.worker("rolled", pace=None, loaded="old", generation=1) as old:
        running = ask(graph)
        await old.until(lambda: len(old.jobs) == 1)
        async with graph.worker("rolled", loaded="new", generation=2) as new:
            assert [await ask(graph) for _ in range(4)] == [200] * 4
            assert len(new.seen) == 4
            assert len(old.seen) == 1
            assert graph.roster._mixed["rolled"] == {"old", "new"}, "it was logged"
            await old.step()
            await old.die()  # while a new one is there, and another old one comes
            await asyncio.sleep(0)
            assert len(new.seen) == 4, "it does not go on where other weights are"
            async with graph.worker("rolled", loaded="old", generation=1, connected=False) as another:
                await another.until(lambda: another.seen)
                assert await running == 200
            assert len(new.seen) == 4


async def test_a_card_of_an_older_generation_changes_nothing(graph: Graph) -> None:
    async with graph.worker("rolled", loaded="b", generation=8) as newest:
        async with graph.worker("rolled", loaded="a", generation=7, connected=False) as older:
            assert await ask(graph) == 200
            assert (len(newest.seen), len(older.seen)) == (1, 0)
        await until(lambda: graph.roster.find("rolled").live == 1)
        assert await ask(graph) == 200
        assert len(newest.seen) == 2
