"""The measured server: any that speaks the OpenAI API."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx

from pdserve.cli.find import GraphAddress, NoGraph, find_graph, view_of
from pdserve.contract.records import Role
from pdserve.util.errors import ConfigError, Unavailable
from pdserve_bench.client import CHAT, COMPLETIONS, Exchange, LoadClient, error_message, trusted

_PROBE_WORDS = 200
_WORD = "{:04d}"
_FIRST_ANSWER = 120.0
"""Timeout of the first requests in seconds: some servers load their model then."""
Message = Mapping[str, str]


@dataclass(frozen=True)
class Endpoint:
    url: str
    """Base URL without `/v1`."""
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    chat: bool = False
    """Use `/v1/chat/completions` instead of `/v1/completions`."""
    max_model_len: int = 0
    """Tokens of a prompt and its response together; 0 if unknown."""

    async def ask(self, exchange: Exchange, timeout: float) -> None:
        """Never raises for a failed request. An incomplete response counts as failed."""
        await LoadClient(self.url, self.headers).ask(exchange, timeout, CHAT if self.chat else COMPLETIONS)
        exchange.error = exchange.error or exchange.cut

    def check_length(self, prompt_tokens: int, answer_len: int) -> None:
        """Raises ConfigError if the model's context is too short."""
        if 0 < self.max_model_len < prompt_tokens + answer_len:
            raise ConfigError(
                [
                    f"--prompt-tokens {prompt_tokens} and --answer-len {answer_len} are more than {self.model} "
                    f"takes on this server: {self.max_model_len} tokens."
                ]
            )

    def body(self, prompt: str | Sequence[Message], tokens: int) -> dict[str, Any]:
        """Return a streamed greedy request for exactly `tokens` output tokens (`ignore_eos`, known by vLLM and servers
        built on it). A list of messages needs a chat endpoint."""
        assert self.chat or isinstance(prompt, str)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return {
            "model": self.model,
            **({"messages": messages} if self.chat else {"prompt": prompt}),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def base_url(url: str) -> str:
    """Return the URL without `/v1` at its end. Raises ConfigError."""
    found = url.strip().rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(found)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid port
        good = False
    if not good or parts.query or parts.fragment or parts.username:
        raise ConfigError([f"--base-url {url}: write it as http://127.0.0.1:8000/v1."])
    return found


async def frontend_url(graph: GraphAddress) -> str:
    """Return the URL of a frontend. Raises NoGraph without a frontend."""
    if graph.url:
        return graph.url
    async with view_of(graph) as view:
        urls = [frontend.address for frontend in view.instances(Role.FRONTEND)]
    if not urls:
        raise NoGraph(f"no frontend runs in namespace {graph.namespace} of {graph.etcd}.")
    return urls[0]


async def server_url(named: str | None, file: Path | None) -> str:
    """Return `--base-url`, else the running graph's URL. Raises ConfigError, and Unavailable without a graph."""
    if named is not None:
        return base_url(named)
    try:
        return await frontend_url(find_graph(file, None, None))
    except NoGraph as error:
        raise Unavailable(f"{error} Use --base-url URL for another server.") from None


def key_headers(key: str) -> dict[str, str]:
    """Return the headers with an API key, if any. Keys read from files often end in a newline."""
    return {"authorization": f"Bearer {key.strip()}"} if key.strip() else {}


async def find_endpoint(
    url: str, model: str = "", headers: Mapping[str, str] | None = None, chat: bool = False
) -> Endpoint:
    """Read `/v1/models` (and choose its first model by default), then send one small request to check that the server
    responds. Raises ConfigError if the model is not served, and Unavailable with the server's error."""
    base, headers = base_url(url), dict(headers or {})
    cards = await _models(base, headers, required=not model)
    served = [str(card["id"]) for card in cards]
    if model and served and model not in served:
        raise ConfigError([f"{base} does not serve {model}: it has {', '.join(served)}."])
    if not model and not served:
        raise Unavailable(f"{base} serves no model yet.")
    name = model or served[0]
    lengths = [card.get("max_model_len") for card in cards if str(card["id"]) == name]
    length = lengths[0] if lengths and isinstance(lengths[0], int) else 0
    return await _answering(Endpoint(base, name, headers, chat, max_model_len=length))


async def _models(base: str, headers: Mapping[str, str], required: bool) -> list[Mapping[str, Any]]:
    """Return the models; empty if the server has no list and none is required."""
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=10.0, verify=trusted()) as http:
            answer = await http.get(f"{base}/v1/models", headers=headers)
            if answer.status_code in (404, 405, 501) and not required:
                return []
            answer.raise_for_status()
            cards: list[Mapping[str, Any]] = answer.json()["data"]
            if any("id" not in card for card in cards):
                raise LookupError("a model without an id")
            return cards
    except httpx.HTTPStatusError as error:
        code, text = error.response.status_code, error_message(error.response.content)
        hint = {
            401: " Give a key with --api-key or OPENAI_API_KEY.",
            403: " Is this the right key (--api-key or OPENAI_API_KEY)?",
            404: " Give the URL as far as /v1, or name the --model of a server that lists none.",
        }.get(code, "")
        raise Unavailable(f"{base}/v1/models answers {code}: {text or 'nothing'}.{hint}") from None
    except (httpx.HTTPError, OSError) as error:
        raise Unavailable(f"{base} cannot be reached: {str(error) or type(error).__name__}.") from None
    except (ValueError, LookupError, TypeError) as error:
        raise Unavailable(f"{base}/v1/models does not follow OpenAI's API: {error!r}") from None


async def _answering(endpoint: Endpoint) -> Endpoint:
    """Send a first request. Raises Unavailable with the server's error."""
    exchange = Exchange(endpoint.body("Hello", 2))
    await endpoint.ask(exchange, _FIRST_ANSWER)
    if exchange.error:
        hint = ". Does it serve only chats (--chat)?" if exchange.status == 404 and not endpoint.chat else ""
        raise Unavailable(f"{endpoint.url} does not answer a first request: {exchange.error}{hint}")
    return endpoint


class Prompts:
    """Prompts of a given length that differ already in their first words, so that no prefix cache has them."""

    def __init__(self, tokens_per_word: float, seed: int | str) -> None:
        self.tokens_per_word = tokens_per_word
        self._random = Random(seed)

    def of(self, tokens: int) -> str:
        """Return a prompt of about `tokens` tokens, at least one word."""
        return " ".join(self.words(max(1, round(tokens / self.tokens_per_word))))

    def words(self, count: int) -> Iterator[str]:
        return (_WORD.format(self._random.randrange(10_000)) for _ in range(count))


async def learn_prompts(endpoint: Endpoint, seed: int) -> Prompts:
    """Measure the tokens per word with two requests. Raises Unavailable with the server's error."""
    words = " ".join(Prompts(1.0, seed).words(_PROBE_WORDS))
    long, short = Exchange(endpoint.body(words, 1)), Exchange(endpoint.body("0000", 1))
    await asyncio.gather(endpoint.ask(long, _FIRST_ANSWER), endpoint.ask(short, _FIRST_ANSWER))
    for exchange in (long, short):
        if exchange.error:
            raise Unavailable(f"{endpoint.url} does not answer a first request: {exchange.error}")
    tokens = long.prompt_tokens - short.prompt_tokens
    if tokens <= 0:  # the server sends no usage
        return Prompts(2.0, seed)
    return Prompts(tokens / (_PROBE_WORDS - 1), seed)
