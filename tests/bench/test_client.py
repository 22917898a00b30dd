"""The benchmarks' HTTP client against servers that respond correctly, wrongly, or not at all."""

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any

import pytest
from pdserve_bench.client import CHAT, Exchange, LoadClient, Outcome, error_message

from pdserve.security.credentials import Credentials
from pdserve.util.net import free_port
from tests.bench.answers import DONE, STREAM, Asked, OpenAi, chunk, delta, event, fixed, tiny_server, whole

STREAMED: Mapping[str, Any] = {"stream": True, "max_tokens": 2}
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}


async def _ask(
    answer: bytes, body: Mapping[str, object] = STREAMED, path: str = CHAT, timeout: float = 10
) -> Exchange:
    exchange = Exchange(body)
    async with tiny_server(fixed(answer)) as server:
        await LoadClient(server.url).ask(exchange, timeout, path)
    return exchange


TWO = event(delta(content="a")) + event(delta(content="b"))
CHOICES = {"choices": [{"delta": {"content": "b"}, "finish_reason": "length"}]}


STREAMS = {
    "plain": TWO + DONE,
    "role first": event(delta(role="assistant", content="")) + event(delta(role="assistant")) + TWO + DONE,
    "comments": chunk(b": keep-alive\n\n") + TWO + chunk(b"event: ping\nid: 3\nretry: 10\n\n") + DONE,
    "no space, CR LF": chunk(b'data:{"choices":[{"delta":{"content":"a"}}]}\r\n\r\n') + event(CHOICES) + DONE,
    "an event in two chunks": (
        chunk(b'data: {"choices":[{"delta":{"con') + chunk(b'tent":"a"}}]}\n\n') + event(CHOICES) + DONE
    ),
    "an event without choices": TWO + event({"choices": []}) + event({"choices": None, "usage": None}) + DONE,
    "an empty event": TWO + event(b"") + event({"error": None, "choices": []}) + DONE,
    "no line end": TWO + chunk(b"data: [DONE]") + b"0\r\n\r\n",
    "a finish_reason, no [DONE]": event(delta(content="a")) + event(CHOICES) + b"0\r\n\r\n",
}


@pytest.mark.parametrize("kind", STREAMS)
async def test_streams_of_all_kinds_are_read(kind: str) -> None:
    exchange = await _ask(STREAM + STREAMS[kind])
    assert (exchange.error, exchange.text, len(exchange.arrivals)) == ("", "ab", 2)
    assert (exchange.outcome, exchange.output_tokens) == (Outcome.FINISHED, 2)
    assert not exchange.reset
    assert not exchange.hung


async def test_a_stream_may_end_with_its_connection() -> None:
    head = b"HTTP/1.0 200 OK\r\n\r\n"
    exchange = await _ask(head + b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n')
    assert (exchange.error, exchange.text) == ("", "a")


async def test_token_counts_come_from_the_usage() -> None:
    event_of_two = event(delta(content="a b"))
    exchange = await _ask(STREAM + event_of_two + event({"choices": [], "usage": USAGE}) + DONE)
    assert (exchange.prompt_tokens, exchange.output_tokens, exchange.cached_tokens) == (7, 2, 5)
    assert len(exchange.arrivals) == 1
    without = await _ask(STREAM + event_of_two + DONE)
    assert (without.prompt_tokens, without.output_tokens, without.cached_tokens) == (0, 1, None)


async def test_reasoning_counts_as_tokens_and_is_the_answer_only_without_text() -> None:
    thought = event(delta(reasoning_content="hm ")) + event(delta(reasoning="so"))
    exchange = await _ask(STREAM + thought + event(delta(content="yes")) + DONE)
    assert (exchange.reasoning, exchange.text, exchange.answer) == ("hm so", "yes", "yes")
    assert len(exchange.arrivals) == 3
    cut = await _ask(STREAM + thought + DONE)
    assert (cut.text, cut.answer) == ("", "hm so")


async def test_a_server_may_respond_without_streaming() -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": "ab"}}], "usage": USAGE}
    exchange = await _ask(whole(answer))
    assert (exchange.error, exchange.text, exchange.output_tokens, len(exchange.arrivals)) == ("", "ab", 2, 1)
    unstreamed = await _ask(whole(answer), {"max_tokens": 2})
    assert (unstreamed.error, unstreamed.text, unstreamed.ttft) == ("", "ab", None)


async def test_latencies_follow_the_arrival_of_tokens() -> None:
    exchange = Exchange({"messages": [], "max_tokens": 2, "stream": True})
    async with tiny_server(OpenAi(ttft=0.1, gap=0.2)) as server:
        await LoadClient(server.url).ask(exchange, 10, CHAT)
    first, second = exchange.arrivals
    assert exchange.ttft == first - exchange.started >= 0.1
    assert exchange.gaps == [second - first]
    assert exchange.ended >= second >= exchange.started + 0.3
    assert exchange.tokens_per_second == pytest.approx(2 / (exchange.ended - first))


@pytest.mark.parametrize(
    ("answer", "error", "reset"),
    [
        (whole({"error": {"message": "too long"}}, 400), "HTTP 400 too long", False),
        (whole({"detail": "Not Found"}, 404), "HTTP 404 Not Found", False),
        (whole(b"<html><head>x</head><h1>Bad\n gateway</h1></html>", 502), "HTTP 502 Bad gateway", False),
        (whole(b"", 307, more="location: https://elsewhere/\r\n"), "HTTP 307 to https://elsewhere/", False),
        (whole({"error": "in a 200"}), "in a 200", False),
        (STREAM + event({"object": "error", "message": "lost"}), "in the stream: lost", False),
        (STREAM + TWO + b"0\r\n\r\n", "the stream ended without [DONE]", False),
        (STREAM + TWO, "connection: closed before the response was complete", True),
        (b"", "connection: closed before the response was complete", True),
        (STREAM + event(b"{garbage"), "unreadable response: ", False),
        (b"220 ESMTP ready\r\n\r\n", "unreadable response: ", False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
async def test_failures_say_why(answer: bytes, error: str, reset: bool) -> None:
    exchange = await _ask(answer)
    assert exchange.error.startswith(error)
    assert exchange.outcome is Outcome.FAILED
    assert (exchange.reset, exchange.hung) == (reset, False)


async def test_a_refused_connection_is_a_failure() -> None:
    exchange = Exchange(STREAMED)
    await LoadClient(f"http://127.0.0.1:{free_port('127.0.0.1')}").ask(exchange, 10)
    assert (exchange.outcome, exchange.reset, exchange.status) == (Outcome.FAILED, True, 0)
    assert exchange.error.startswith("connection: ")


async def _never(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM + event(delta(content="a")))
    await writer.drain()
    await asyncio.Event().wait()


async def test_a_timeout_keeps_the_received_tokens() -> None:
    exchange = Exchange(STREAMED)
    async with tiny_server(_never) as server:
        await LoadClient(server.url).ask(exchange, 0.2, CHAT)
    assert (exchange.outcome, exchange.hung, exchange.reset) == (Outcome.FAILED, True, False)
    assert (exchange.error, exchange.text) == ("no end within 0.2 s", "a")


async def test_a_key_and_an_id_are_sent() -> None:
    exchange = Exchange(STREAMED)
    async with tiny_server(fixed(STREAM + TWO + DONE)) as server:
        await LoadClient(f"{server.url}/behind/", {"authorization": "Bearer k"}).ask(exchange, 10, CHAT)
    (asked,) = server.asked
    assert (asked.method, asked.path, asked.body) == ("POST", f"/behind{CHAT}", STREAMED)
    assert asked.headers["authorization"] == "bearer k"  # the tiny server converts headers to lower case
    assert asked.headers["x-request-id"] == exchange.request_id


async def test_https_trusts_the_certificates_of_ssl_cert_file(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(credentials.certificate, credentials.key)
    trusted, refused = Exchange(STREAMED), Exchange(STREAMED)
    async with tiny_server(fixed(STREAM + TWO + DONE), secure) as server:
        await LoadClient(server.url).ask(refused, 10, CHAT)
        monkeypatch.setenv("SSL_CERT_FILE", str(credentials.authority))
        await LoadClient(server.url).ask(trusted, 10, CHAT)
    assert "certificate" in refused.error.lower()
    assert (trusted.error, trusted.text) == ("", "ab")


def test_long_messages_are_cut() -> None:
    assert error_message(b"x" * 5000) == "x" * 300
