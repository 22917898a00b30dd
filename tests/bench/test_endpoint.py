"""The check of a server before it is measured: its models, its errors, its token counts."""

import asyncio
import os
from pathlib import Path

import pytest
from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.endpoint import Endpoint, base_url, find_endpoint, key_headers, learn_prompts, server_url

from pdserve import registry
from pdserve.contract.records import Instance, Role, encode_record
from pdserve.registry import keys
from pdserve.supervisor import state
from pdserve.supervisor.state import GraphRecord
from pdserve.util.errors import ConfigError, Unavailable
from tests.bench.answers import DONE, STREAM, Asked, OpenAi, Respond, event, fixed, tiny_server, whole


def test_base_url_drops_v1_and_refuses_other_urls() -> None:
    assert base_url(" http://127.0.0.1:8000/v1/ ") == "http://127.0.0.1:8000"
    assert base_url("https://example.com/openai/v1") == "https://example.com/openai"
    assert base_url("http://[::1]:8000") == "http://[::1]:8000"
    for url in ("http://", "http://host:port/v1", "http://host:8000/v1?key=1", "ftp://host/v1"):
        with pytest.raises(ConfigError, match=r"--base-url .*: write it as http://127.0.0.1:8000/v1"):
            base_url(url)


async def test_the_default_server_is_the_running_graph(
    tmp_path: Path, etcd_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDSERVE_ETCD", raising=False)
    monkeypatch.setenv("PDSERVE_STATE_DIR", str(tmp_path))
    assert await server_url("http://127.0.0.1:1/v1", None) == "http://127.0.0.1:1"
    with pytest.raises(Unavailable, match=rf"no graph runs on {tmp_path}: .* --base-url URL"):
        await server_url(None, None)
    state.write(tmp_path, GraphRecord(os.getpid(), "", "demo", "pdserve", "", "", "https://127.0.0.1:8009"))
    assert await server_url(None, None) == "https://127.0.0.1:8009"
    file = tmp_path / "elsewhere.yaml"
    file.write_text(
        f"Graph: {{etcd: '{etcd_url}', nats: 'nats://127.0.0.1:1', namespace: bench-url}}\n"
        "VllmWorker: {model: demo}\n"
    )
    with pytest.raises(Unavailable, match="no frontend runs in namespace bench-url"):
        await server_url(None, file)
    async with registry.connect(etcd_url, "bench-url") as connected:
        frontend = Instance("frontend-0-a", Role.FRONTEND, address="http://10.0.0.7:8009")
        await connected.put(keys.instance(frontend), encode_record(frontend))
        assert await server_url(None, file) == "http://10.0.0.7:8009"


async def test_the_endpoint_has_the_servers_model() -> None:
    async with tiny_server(OpenAi()) as server:
        found = await find_endpoint(f"{server.url}/v1", headers=key_headers("k\n"), chat=True)
        named = await find_endpoint(server.url, "tiny", headers=key_headers(""))
        with pytest.raises(ConfigError, match=r"does not serve other: it has tiny"):
            await find_endpoint(server.url, "other")
    assert found == Endpoint(server.url, "tiny", {"authorization": "Bearer k"}, True, max_model_len=1000)
    with pytest.raises(ConfigError, match="more than tiny takes on this server: 1000 tokens"):
        found.check_length(990, 11)
    assert (named.model, named.chat) == ("tiny", False)
    assert [asked.path for asked in server.asked[:2]] == ["/v1/models", "/v1/chat/completions"]
    keys = [asked.headers.get("authorization") for asked in server.asked[:3]]
    assert keys == ["bearer k", "bearer k", None]


def without(path: str) -> Respond:
    """Respond as a server without this path."""
    tiny = OpenAi()

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.path == path:
            writer.write(whole({"detail": "Not Found"}, 404))
        else:
            await tiny(asked, writer)

    return respond


async def test_a_server_without_a_list_of_models_can_be_asked_for_a_named_one() -> None:
    async with tiny_server(without("/v1/models")) as server:
        found = await find_endpoint(server.url, "any")
        with pytest.raises(Unavailable, match=r"answers 404: Not Found\. Give the URL as far as /v1"):
            await find_endpoint(server.url)
    assert (found.model, found.max_model_len) == ("any", 0)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (whole({"error": {"message": "no key"}}, 401), r"answers 401: no key\. Give a key with --api-key"),
        (whole(b"<html>Bad gateway</html>", 502), r"answers 502: Bad gateway\."),
        (whole({"data": []}), r"serves no model yet"),
        (whole(b"<html>a page</html>"), r"does not follow OpenAI's API"),
        (whole({"data": [{"name": "x"}]}), r"does not follow OpenAI's API"),
        (b"220 ESMTP\r\n\r\n", r"cannot be reached"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_unusable_server_is_refused_with_the_reason(answer: bytes, told: str) -> None:
    async with tiny_server(fixed(answer)) as server:
        with pytest.raises(Unavailable, match=told):
            await find_endpoint(server.url)


async def test_a_server_with_only_chats_needs_the_chat_option() -> None:
    async with tiny_server(without("/v1/completions")) as server:
        with pytest.raises(Unavailable, match=r"HTTP 404 Not Found\. Does it serve only chats \(--chat\)\?"):
            await find_endpoint(server.url)
        assert (await find_endpoint(server.url, chat=True)).chat


@pytest.mark.parametrize("chat", [True, False])
async def test_prompts_have_the_length_that_was_asked_for(chat: bool) -> None:
    async with tiny_server(OpenAi()) as server:
        endpoint = Endpoint(server.url, "tiny", chat=chat)
        prompts = await learn_prompts(endpoint, 1)
        made = [prompts.of(tokens) for tokens in (100, 500, 500)]
        asked = [Exchange(endpoint.body(prompt, 1)) for prompt in made]
        for exchange in asked:
            await endpoint.ask(exchange, 10)
    assert [exchange.prompt_tokens for exchange in asked] == [100, 500, 500]
    assert made[1].split()[0] != made[2].split()[0]


async def test_without_usage_two_tokens_per_word_are_assumed() -> None:
    async with tiny_server(OpenAi(usage=False)) as server:
        prompts = await learn_prompts(Endpoint(server.url, "tiny"), 1)
        assert len(prompts.of(100).split()) == 50


@pytest.mark.parametrize(
    ("end", "tokens", "error"),
    [
        ("length", 2, ""),
        ("abort", 2, "the answer ended with finish_reason 'abort'"),
        (None, 2, "the answer ended with finish_reason None"),
        ("stop", 1, "an answer of 1 tokens, not 2, with finish_reason 'stop'"),
    ],
)
async def test_an_incomplete_response_has_failed(end: str | None, tokens: int, error: str) -> None:
    choices = {"choices": [{"text": "a b", "finish_reason": end}], "usage": {"completion_tokens": tokens}}
    async with tiny_server(fixed(STREAM + event(choices) + DONE)) as server:
        endpoint = Endpoint(server.url, "tiny")
        exchange = Exchange(endpoint.body("a", 2))
        await endpoint.ask(exchange, 10)
    assert (exchange.error, exchange.outcome is Outcome.FAILED) == (error, bool(error))
