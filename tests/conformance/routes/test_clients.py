"""What OpenAI's and Anthropic's clients make of the responses: objects, events, parsed models, exceptions."""

from collections.abc import Callable, Mapping
from operator import attrgetter
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
CHATS, ANSWERS = "chat.completions", {"input": SHORT, "max_output_tokens": 16, "store": False}
Use = Callable[[Any], Any]


class Code(BaseModel):
    code: int


def seen(value: Any) -> Any:
    """Return a client's object, with its type, as JSON."""
    if isinstance(value, BaseModel):
        return [type(value).__name__, masked(value.model_dump(mode="json", warnings=False))]
    if isinstance(value, openai.Stream | anthropic.Stream):
        return streamed(list(value))
    return masked(value)


def streamed(events: list[Any]) -> list[Any]:
    """Return text, finish, kinds of events, and all events that do not depend on how tokens are grouped."""
    ends = [choice.finish_reason for event in events for choice in getattr(event, "choices", ())]
    kinds = list(dict.fromkeys(getattr(event, "type", "") for event in events))
    whole = [event for event in events[1:] if not said(event) and not getattr(event, "choices", ())]
    first = [seen(event) for event in events[:1] if not hasattr(event, "choices") or not said(event)]
    return ["".join(map(said, events)), ends[-1:], kinds, first, [seen(event) for event in whole]]


def said(event: Any) -> str:
    """The text of an event of a stream."""
    parts = [getattr(choice, "delta", choice) for choice in getattr(event, "choices", ())]
    parts.append(getattr(event, "delta", None))
    return "".join(getattr(part, "content", None) or getattr(part, "text", None) or "" for part in parts)


def refused(error: Exception) -> list[Any]:
    """Return all that an exception handler can read."""
    names = ("status_code", "code", "param", "type", "message", "body")
    return [type(error).__name__, *(getattr(error, name, None) for name in names)]


def call(method: str, **asked: Any) -> Use:
    return lambda client: attrgetter(method)(client)(**{"model": "demo", **asked})


def helped(method: str, final: str, **asked: Any) -> Use:
    """Return a function that runs the client's own stream helper and returns its kinds of events and its result."""

    def use(client: Any) -> Any:
        with call(method, **asked)(client) as stream:
            kinds = list(dict.fromkeys(event.type for event in stream))
            return [kinds, seen(getattr(stream, final)())]

    return use


OPENAI: Mapping[str, Use] = {
    "chat": call(f"{CHATS}.create", messages=HELLO, max_tokens=8, seed=1, user="me"),
    "chat, long": call(f"{CHATS}.create", messages=LONG, max_tokens=8),
    "chat, streamed": call(
        f"{CHATS}.create", messages=HELLO, max_tokens=12, stream=True, stream_options={"include_usage": True}
    ),
    "chat, stream helper": helped(f"{CHATS}.stream", "get_final_completion", messages=HELLO, max_tokens=12),
    "chat, parsed": call(
        f"{CHATS}.parse", messages=HELLO, max_tokens=64, response_format=Code, temperature=0
    ),
    "chat, cut": call(f"{CHATS}.parse", messages=HELLO, max_tokens=1, response_format=Code),
    "completion": call("completions.create", prompt=[SHORT, "The"], max_tokens=8, echo=True),
    "response": call("responses.create", **ANSWERS),
    "response, stream helper": helped("responses.stream", "get_final_response", **ANSWERS),
    "response, parsed": call(
        "responses.parse", **ANSWERS | {"max_output_tokens": 64}, text_format=Code, temperature=0
    ),
    "models": lambda client: [model.id for model in client.models.list()],
    "wrong model": call(f"{CHATS}.create", model="no-such-model", messages=HELLO),
    "stream refused": call(f"{CHATS}.create", messages=HELLO, max_tokens=5000, stream=True),
}
ANTHROPIC: Mapping[str, Use] = {
    "message": call("messages.create", messages=HELLO, max_tokens=8, system="Be short."),
    "message, streamed": call("messages.create", messages=LONG, max_tokens=8, stream=True),
    "message, stream helper": helped("messages.stream", "get_final_message", messages=HELLO, max_tokens=8),
    "wrong model": call("messages.create", model="no-such-model", messages=HELLO, max_tokens=8),
    "stream refused": call("messages.create", messages=HELLO, max_tokens=5000, stream=True),
}


def openai_s(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def anthropic_s(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, auth_token=KEY, api_key=None, max_retries=0)


@pytest.mark.parametrize(
    ("client_of", "use"),
    [
        *(pytest.param(openai_s, use, id=f"openai {name}") for name, use in OPENAI.items()),
        *(pytest.param(anthropic_s, use, id=f"anthropic {name}") for name, use in ANTHROPIC.items()),
    ],
)
def test_clients_see_no_difference(pair: Pair, client_of: Callable[[str], Any], use: Use) -> None:
    found = []
    for url in (pair.ours, pair.theirs):
        with client_of(url) as client:
            try:
                found.append(seen(use(client)))
            except (openai.OpenAIError, anthropic.AnthropicError, ValueError) as error:
                found.append(refused(error))
    assert found[0] == found[1]
