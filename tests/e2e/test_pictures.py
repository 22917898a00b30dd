"""Pictures on real engines: token for token what one vLLM server says of them, whether prompts are prefilled remotely,
their KV is cached, they are preempted, or their worker is killed."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.ports import free_port
from tests.e2e.graph import RealGraph, serving
from tests.frontend.model.test_pictures import BLUE, LARGE, RED, part
from tests.real import GRAPH, KEY, Reference, one_vllm
from tools.demo_model import sight

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
SHORT, LONG = "Say what this is. ", "The code of the red box is 1234. " * 20
CASES: dict[str, dict[str, Any]] = {}


def case(name: str, text: str, *urls: str, tokens: int = 24) -> None:
    content = [*map(part, urls), {"type": "text", "text": text}]
    CASES[name] = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens}


case("none", LONG)
case("short red", SHORT, RED)
case("short blue", SHORT, BLUE)
case("red", LONG, RED)
case("blue", LONG, BLUE)
case("large", LONG, LARGE)
case("two", LONG, RED, BLUE)
case("other two", LONG, BLUE, RED)
case("stream", LONG.replace("1", "5"), BLUE, tokens=400)
case("grows", LONG.replace("1", "6"), RED, tokens=600)
case("preempted", LONG.replace("1", "7"), BLUE, tokens=300)
CASES["preempted"]["messages"][0]["content"].reverse()  # the last blocks of a prompt leave the cache first


def body(name: str) -> dict[str, Any]:
    same = {"model": "demo", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return CASES[name] | same


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sight.make(tmp_path_factory.mktemp("sight"))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """By case, from a server that is gone when the graph starts."""
    with one_vllm(tmp_path_factory.mktemp("vllm"), model) as reference:
        return {name: plain(reference, name) for name in CASES}


def plain(reference: Reference, name: str) -> list[int]:
    headers, url = {"authorization": f"Bearer {KEY}"}, f"{reference.url}/v1/chat/completions"
    answer = httpx.post(url, json=body(name), headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


@pytest.fixture(scope="module")
def graph(
    expected: dict[str, list[int]], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealGraph]:
    """Its decode worker has KV blocks for one request of the longest context."""
    yaml = GRAPH.format(port=free_port("127.0.0.1"), kv_port=free_port("127.0.0.1", 2), decode=1, prefill=1)
    yaml = yaml.replace("model: demo", f"model: {model}").replace(
        "max-model-len: 4096", "max-model-len: 1024"
    )
    yaml = yaml.replace("VllmWorker:\n", "VllmWorker:\n  num-gpu-blocks-override: 34\n")
    with serving(yaml, tmp_path_factory.mktemp("seeing")) as graph:
        yield graph


async def ask(
    graph: RealGraph, name: str, seen: Callable[[int], None] = lambda _: None
) -> tuple[list[int], str]:
    """The tokens of a stream, and how its prompt was prefilled. `seen`: called with how many came."""
    found = list[int]()
    async with (
        httpx.AsyncClient(base_url=graph.url, timeout=300) as client,
        client.stream("POST", "/v1/chat/completions", json=body(name) | {"stream": True}) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                found += chunk["choices"][0].get("token_ids") or [] if chunk["choices"] else []
                seen(len(found))
    return found, answer.headers["x-pdserve-prefill"]


def test_each_picture_is_answered_for_itself(expected: dict[str, list[int]]) -> None:
    for alike in (("none", "red", "blue", "large", "two", "other two"), ("short red", "short blue")):
        assert len({tuple(expected[name]) for name in alike}) == len(alike)


async def test_the_graph_answers_as_one_server(graph: RealGraph, expected: dict[str, list[int]]) -> None:
    """One after the other, then together, again with what is cached."""
    names = list(CASES)[:8]
    first = {name: await ask(graph, name) for name in names}
    assert {name: found for name, (found, _) in first.items()} == {name: expected[name] for name in names}
    assert {first[name][1] for name in names if "short" not in name} == {"remote"}
    again = await asyncio.gather(*(ask(graph, name) for name in names))
    assert {name: found for name, (found, _) in zip(names, again, strict=True)} == {
        name: expected[name] for name in names
    }


async def test_a_preempted_request_is_computed_again_with_its_picture(
    graph: RealGraph, expected: dict[str, list[int]]
) -> None:
    names = ("grows", "preempted")
    before = graph.metrics()
    answers = await asyncio.gather(*(ask(graph, name) for name in names))
    assert [found for found, _ in answers] == [expected[name] for name in names]
    assert [way for _, way in answers] == ["remote", "remote"]
    after, counted = graph.metrics(), "vllm:num_preemptions_total"
    assert after(counted) > before(counted)
    assert after("pdserve_migrations_total") == 0, "the engine has not died of it"


async def test_a_stream_goes_on_at_a_stand_in(graph: RealGraph, expected: dict[str, list[int]]) -> None:
    def kill(count: int) -> None:
        if count > 20 and not killed:
            killed.extend(each for each in graph.processes() if "decode" in each.cmdline())
            for each in killed:
                each.kill()

    killed = list[Any]()
    found, _ = await ask(graph, "stream", kill)
    assert killed
    assert found == expected["stream"]
