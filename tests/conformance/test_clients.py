"""What OpenAI's and Anthropic's own clients make of the answers: objects, events, parsed models, exceptions."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.conformance.answers import masked
from tests.conformance.pair import Pair
from tests.conformance.prompts import SHORT, long
from tests.real import KEY

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

HELLO: Any = [{"role": "user", "content": SHORT}]
LONG: Any = [{"role": "user", "content": long("clients")}]


class Code(BaseModel):
    code: int


def seen(value: Any) -> Any:
    """A client's object, with its type."""
    if isinstance(value, BaseModel):
        return [type(value).__name__, masked(value.model_dump(mode="json", warnings=False))]
    return masked(value)


def refused(error: Exception) -> list[Any]:
    """All that a handler of the exception can look at."""
    names = ("status_code", "code", "param", "type", "message", "body")
    return [type(error).__name__, *(getattr(error, name, None) for name in names)]


def joined(chunks: list[Any]) -> str:
    """The text of a chat's chunks."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


# OpenAI


def chat(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(model="demo", messages=HELLO, max_tokens=8, seed=1, user="me")


def chat_raw(client: openai.OpenAI) -> Any:
    raw = client.chat.completions.with_raw_response.create(model="demo", messages=LONG, max_tokens=8)
    assert raw.headers.get("x-pdserve-prefill", "remote") in ("remote", "local")
    return [raw.status_code, raw.headers["content-type"], seen(raw.parse())]


def chat_stream(client: openai.OpenAI) -> Any:
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=HELLO, max_tokens=12, stream=True, stream_options=options
        )
    )
    return [joined(chunks), seen(chunks[0]), seen(chunks[-1])]


def chat_stream_helper(client: openai.OpenAI) -> Any:
    with client.chat.completions.stream(model="demo", messages=HELLO, max_tokens=12) as stream:
        kinds = list(dict.fromkeys(event.type for event in stream))
        return [kinds, seen(stream.get_final_completion())]


def chat_parse(client: openai.OpenAI) -> Any:
    parsed = client.chat.completions.parse(
        model="demo", messages=HELLO, max_tokens=64, response_format=Code, temperature=0
    )
    return [seen(parsed.choices[0].message.parsed), parsed.choices[0].finish_reason]


def chat_parse_cut(client: openai.OpenAI) -> Any:
    return client.chat.completions.parse(model="demo", messages=HELLO, max_tokens=1, response_format=Code)


def completion(client: openai.OpenAI) -> Any:
    return client.completions.create(model="demo", prompt=[SHORT, "The"], max_tokens=8, echo=True)


def completion_stream(client: openai.OpenAI) -> Any:
    chunks = list(client.completions.create(model="demo", prompt=SHORT, max_tokens=8, stream=True))
    return ["".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason]


def response(client: openai.OpenAI) -> Any:
    return client.responses.create(model="demo", input=SHORT, max_output_tokens=16, store=False)


def response_text(client: openai.OpenAI) -> Any:
    return client.responses.create(model="demo", input=SHORT, max_output_tokens=16, store=False).output_text


def response_stream(client: openai.OpenAI) -> Any:
    with client.responses.stream(model="demo", input=SHORT, max_output_tokens=16, store=False) as stream:
        kinds = list(dict.fromkeys(event.type for event in stream))
        return [kinds, seen(stream.get_final_response())]


def response_parse(client: openai.OpenAI) -> Any:
    found = client.responses.parse(
        model="demo", input=SHORT, text_format=Code, max_output_tokens=64, store=False, temperature=0
    )
    return seen(found.output_parsed)


def models(client: openai.OpenAI) -> Any:
    return [model.id for model in client.models.list()]


def wrong_model(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(model="no-such-model", messages=HELLO)


def wrong_value(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(model="demo", messages=HELLO, temperature=-1)


def wrong_type(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(model="demo", messages="hello")  # type: ignore[arg-type]


def too_long(client: openai.OpenAI) -> Any:
    return client.completions.create(model="demo", prompt="x " * 9000)


def too_much(client: openai.OpenAI) -> Any:
    return client.completions.create(model="demo", prompt="x", max_tokens=10**6)


def stream_refused(client: openai.OpenAI) -> Any:
    return list(client.chat.completions.create(model="demo", messages=HELLO, max_tokens=5000, stream=True))


def response_refused(client: openai.OpenAI) -> Any:
    return list(
        client.responses.create(model="demo", input=SHORT, max_output_tokens=5000, stream=True, store=False)
    )


def no_embeddings(client: openai.OpenAI) -> Any:
    try:
        return client.embeddings.create(model="demo", input="x")
    except openai.APIStatusError as error:
        return [
            type(error).__name__,
            error.status_code,
        ]  # the body of an unknown route is a listed difference


OPENAI: list[Callable[[openai.OpenAI], Any]] = [
    chat, chat_raw, chat_stream, chat_stream_helper, chat_parse, chat_parse_cut, completion, completion_stream,
    response, response_text, response_stream, response_parse, models, wrong_model, wrong_value, wrong_type, too_long,
    too_much, stream_refused, response_refused, no_embeddings,
]  # fmt: skip


@pytest.mark.parametrize("use", OPENAI, ids=lambda use: use.__name__)
def test_openai(pair: Pair, use: Callable[[openai.OpenAI], Any]) -> None:
    found = []
    for url in (pair.ours, pair.theirs):
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            try:
                found.append(seen(use(client)))
            except (openai.OpenAIError, ValueError) as error:
                found.append(refused(error))
    assert found[0] == found[1]


async def async_chat(client: openai.AsyncOpenAI) -> Any:
    return await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=8)


async def async_stream(client: openai.AsyncOpenAI) -> Any:
    stream = await client.chat.completions.create(model="demo", messages=LONG, max_tokens=12, stream=True)
    return joined([chunk async for chunk in stream])


async def async_many(client: openai.AsyncOpenAI) -> Any:
    prompts = [long(f"many {number}") for number in range(6)]
    asked = (client.completions.create(model="demo", prompt=prompt, max_tokens=8) for prompt in prompts)
    return [answer.choices[0].text for answer in await asyncio.gather(*asked)]


async def async_refused(client: openai.AsyncOpenAI) -> Any:
    return await client.completions.create(model="demo", prompt="x", temperature=-1)


ASYNC: list[Callable[[openai.AsyncOpenAI], Awaitable[Any]]] = [
    async_chat, async_stream, async_many, async_refused,
]  # fmt: skip


@pytest.mark.parametrize("use", ASYNC, ids=lambda use: use.__name__)
async def test_openai_async(pair: Pair, use: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> None:
    found = []
    for url in (pair.ours, pair.theirs):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            try:
                found.append(seen(await use(client)))
            except openai.OpenAIError as error:
                found.append(refused(error))
    assert found[0] == found[1]


# Anthropic


def message(client: anthropic.Anthropic) -> Any:
    return client.messages.create(model="demo", messages=HELLO, max_tokens=8, system="Be short.")


def message_events(client: anthropic.Anthropic) -> Any:
    events = list(client.messages.create(model="demo", messages=LONG, max_tokens=8, stream=True))
    return [list(dict.fromkeys(event.type for event in events)), seen(events[0]), seen(events[-2])]


def message_stream(client: anthropic.Anthropic) -> Any:
    with client.messages.stream(model="demo", messages=HELLO, max_tokens=8) as stream:
        text = "".join(stream.text_stream)
        return [text, seen(stream.get_final_message())]


def count(client: anthropic.Anthropic) -> Any:
    return client.messages.count_tokens(model="demo", messages=HELLO)


def message_wrong_model(client: anthropic.Anthropic) -> Any:
    return client.messages.create(model="no-such-model", messages=HELLO, max_tokens=8)


def message_wrong_type(client: anthropic.Anthropic) -> Any:
    return client.messages.create(model="demo", messages="x", max_tokens=8)  # type: ignore[arg-type]


def message_too_much(client: anthropic.Anthropic) -> Any:
    return client.messages.create(model="demo", messages=HELLO, max_tokens=5000)


def message_stream_refused(client: anthropic.Anthropic) -> Any:
    return list(client.messages.create(model="demo", messages=HELLO, max_tokens=5000, stream=True))


ANTHROPIC: list[Callable[[anthropic.Anthropic], Any]] = [
    message, message_events, message_stream, count, message_wrong_model, message_wrong_type, message_too_much,
    message_stream_refused,
]  # fmt: skip


@pytest.mark.parametrize("use", ANTHROPIC, ids=lambda use: use.__name__)
def test_anthropic(pair: Pair, use: Callable[[anthropic.Anthropic], Any]) -> None:
    found = []
    for url in (pair.ours, pair.theirs):
        with anthropic.Anthropic(base_url=url, auth_token=KEY, api_key=None, max_retries=0) as client:
            try:
                found.append(seen(use(client)))
            except anthropic.AnthropicError as error:
                found.append(refused(error))
    if use is message_wrong_type:  # vLLM says it in OpenAI's shape
        assert found[0][-1]["type"] == "error"
        found = [each[:2] for each in found]
    assert found[0] == found[1]
