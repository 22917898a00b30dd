"""Prompts with images on real engines: after remote prefill, prefix hits, preemption and the loss of a worker, the
tokens are still those of one vLLM server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pdserve_bench.client import Exchange, LoadClient

from tests.conditions import until
from tests.conformance.answers import Answer, Request
from tests.conformance.asking import CHAT, MESSAGES, RESPONSES
from tests.conformance.pair import alone, same
from tests.e2e.graph import RealGraph, serving
from tests.frontend.vllm.test_images import BLUE, LARGE, RED, data, part, png
from tests.real import graph_yaml, one_vllm
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
CASES["preempted"]["messages"][0]["content"].reverse()  # image last: a prompt's last blocks are evicted first


def body(name: str) -> dict[str, Any]:
    same = {"model": "demo", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return CASES[name] | same


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sight.make(tmp_path_factory.mktemp("sight"))


def request(name: str, *parts: dict[str, Any], differs: str = "", **more: Any) -> Request:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": SHORT}]}]
    asked = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0}
    return Request(name, CHAT, asked | more, differs=differs)


SOURCE = {"type": "base64", "media_type": "image/png", "data": RED.partition(",")[2]}
NO_IMAGE = part("data:image/png;base64,AAAA")
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
NOT_INLINE = "`image_url` without an image in it"
REQUESTS = [
    request("an image", part(RED)),
    request("a stream", part(RED), stream=True, stream_options={"include_usage": True}),
    request("with detail", {"type": "image_url", "image_url": {"url": RED, "detail": "low"}}),
    request("two with logprobs", part(BLUE), part(RED), logprobs=True, top_logprobs=2),
    Request("messages API", MESSAGES, {"model": "demo", "max_tokens": 8, "temperature": 0, "messages":
            [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]}),
    Request("responses API", RESPONSES, {"model": "demo", "max_output_tokens": 8, "temperature": 0, "input":
            [{"role": "user", "content": [{"type": "input_image", "image_url": RED, "detail": "auto"}]}]}),
    request("no PNG", NO_IMAGE),
    request("no base64", part("data:image/png,AAAA"), differs=NOT_INLINE),
    request("no data", part("data:image/png;base64,")),
    request("file URL", part("file:///etc/passwd"), differs=NOT_INLINE),
    request("no URL", part("x"), differs=NOT_INLINE),
    request("no image_url", {"type": "image_url"}),
    request("URL a number", {"type": "image_url", "image_url": {"url": 1}}),
    request("image_url a text", {"type": "image_url", "image_url": RED}),
    request("audio", AUDIO),
    request("embeddings", {"type": "image_embeds", "image_embeds": "AAAA"}),
    request("no PNG, stream", NO_IMAGE, stream=True),
    request("too many", *[part(RED)] * 17, differs="images of a prompt"),
    request("too large", part(data(png("red", (8000, 5000)))), differs="pixels of a request's images"),
    request("http URL", part("http://127.0.0.1:9/red"), differs=NOT_INLINE),
    request("with uuid", part(RED, uuid="mine")),
    request("another image, same uuid", part(BLUE, uuid="mine"), differs="`uuid` of an image"),
]  # fmt: skip


@pytest.fixture(scope="module")
def vllm_answers(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, list[int]], dict[str, Answer]]:
    """Tokens by case, and responses by request, of one vLLM server that ends before the graph starts."""
    with one_vllm(tmp_path_factory.mktemp("vllm"), model) as reference:
        answers = {name: alone(reference.url, Request(name, CHAT, body(name))) for name in CASES}
        tokens = {name: answer.body["choices"][0]["token_ids"] for name, answer in answers.items()}
        return tokens, {request.name: alone(reference.url, request) for request in REQUESTS}


@pytest.fixture(scope="module")
def expected(vllm_answers: tuple[dict[str, list[int]], dict[str, Answer]]) -> dict[str, list[int]]:
    return vllm_answers[0]


@pytest.fixture(scope="module")
def graph(
    expected: dict[str, list[int]], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealGraph]:
    """The decode worker has KV blocks for one request of maximal length."""
    yaml = graph_yaml()
    yaml = yaml.replace("model: demo", f"model: {model}").replace(
        "max-model-len: 4096", "max-model-len: 1024"
    )
    yaml = yaml.replace("VllmWorker:\n", "VllmWorker:\n  num-gpu-blocks-override: 34\n")
    with serving(yaml, tmp_path_factory.mktemp("seeing")) as graph:
        yield graph


async def ask(graph: RealGraph, *names: str) -> list[Exchange]:
    """Send these cases as concurrent streams, and check that none fails."""
    asked = [Exchange(body(name) | {"stream": True}) for name in names]
    await asyncio.gather(*(LoadClient(graph.url).ask(each, 300, CHAT) for each in asked))
    assert [each.error for each in asked if each.error] == []
    return asked


async def test_tokens_equal_those_of_one_server(graph: RealGraph, expected: dict[str, list[int]]) -> None:
    """The cases run one after another, then together with prefix hits."""
    names = list(CASES)[:8]
    alike = [name for name in names if "short" not in name]
    assert len({tuple(expected[name]) for name in alike}) == len(alike), "each image changes the tokens"
    first = [answer for name in names for answer in await ask(graph, name)]
    assert {name: answer.tokens for name, answer in zip(names, first, strict=True)} == {
        name: expected[name] for name in names
    }
    assert {answer.prefill for name, answer in zip(names, first, strict=True) if name in alike} == {"remote"}
    assert [answer.tokens for answer in await ask(graph, *names)] == [expected[name] for name in names]


def test_responses_equal_vllms(
    graph: RealGraph,
    vllm_answers: tuple[dict[str, list[int]], dict[str, Answer]],
    subtests: pytest.Subtests,
) -> None:
    for request in REQUESTS:
        with subtests.test(request.name):
            same(request, alone(graph.url, request), vllm_answers[1][request.name])


async def test_a_preempted_request_is_computed_again_with_its_image(
    graph: RealGraph, expected: dict[str, list[int]]
) -> None:
    before = graph.metrics()
    answers = await ask(graph, "grows", "preempted")
    assert [answer.tokens for answer in answers] == [expected["grows"], expected["preempted"]]
    assert [answer.prefill for answer in answers] == ["remote", "remote"]
    after, counted = graph.metrics(), "vllm:num_preemptions_total"
    assert after(counted) > before(counted)
    assert after("pdserve_migrations_total") == 0, "the engine has not died"


async def test_a_stream_continues_at_a_stand_in(graph: RealGraph, expected: dict[str, list[int]]) -> None:
    stream = Exchange(body("stream") | {"stream": True})
    asking = asyncio.create_task(LoadClient(graph.url).ask(stream, 300, CHAT))
    await until(lambda: len(stream.tokens) > 20, 120)
    (worker,) = (each for each in graph.processes() if "decode" in each.cmdline())
    worker.kill()
    assert not stream.ended
    await asking
    assert (stream.tokens, stream.error) == (expected["stream"], "")
