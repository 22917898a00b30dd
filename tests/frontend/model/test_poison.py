"""A request that kills the engine which computes it costs two engines, and no other request anything."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.conditions import until
from tests.engine.sims import expected
from tests.frontend.conftest import Graph
from tests.frontend.model.sims import FATAL, sim_engines
from tests.frontend.test_generate import complete, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


def post(graph: Graph, prompt: list[int], **changes: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(complete(graph, prompt=prompt, **changes))


async def test_poison_ends_after_two_engines_and_the_others_are_served(graph: Graph) -> None:
    async with sim_engines(graph, 4, 2) as engines:
        prompts = [[300 + number, *range(400, 440)] for number in range(16)]
        innocents = [post(graph, prompt, max_tokens=150) for prompt in prompts[:12]]
        await until(lambda: all(engine.usage.running >= 3 for engine in engines[:4]))
        poison = post(graph, [FATAL, *range(500, 700)], max_tokens=8)
        innocents += [post(graph, prompt, max_tokens=50) for prompt in prompts[12:]]
        answer = await poison
        answers = await asyncio.gather(*innocents)
        dead = sum(engine.faults.dead for engine in engines)
        texts = [
            await text_of(graph, expected(prompt, 150 if prompt in prompts[:12] else 50))
            for prompt in prompts
        ]
    assert answer.status_code == 500
    assert "2 engines in a row died" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert dead == 2
    assert [answer.status_code for answer in answers] == [200] * 16
    assert [answer.json()["choices"][0]["text"] for answer in answers] == texts


async def test_after_a_loss_it_goes_another_way(graph: Graph) -> None:
    """KV that was read from another engine kills: the next worker computes the prompt itself."""
    async with sim_engines(graph, 3, 1) as engines:
        for engine in engines[:3]:
            engine.faults.fatal_pulls = True
        prompt = list(range(400, 600))
        answer = await post(graph, prompt, max_tokens=20)
        dead = sum(engine.faults.dead for engine in engines)
        text = await text_of(graph, expected(prompt, 20))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == text
    assert dead == 1
