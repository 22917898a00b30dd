"""The server that is measured: any that speaks OpenAI's API."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from pdserve.errors import ConfigError, Unavailable
from pdserve_bench.client import CHAT, COMPLETIONS, Exchange, LoadClient

_PROBE_WORDS = 200
_WORD = "{:04d}"
Message = Mapping[str, str]


@dataclass(frozen=True)
class Endpoint:
    url: str
    """a base URL without `/v1`"""
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    chat: bool = False
    """ask `/v1/chat/completions`, else `/v1/completions`"""
    without: frozenset[str] = frozenset()
    """fields of a request that it refuses"""

    async def ask(self, exchange: Exchange, timeout: float) -> None:
        """Never fails: what goes wrong is told by the exchange."""
        await LoadClient(self.url, self.headers).ask(exchange, timeout, CHAT if self.chat else COMPLETIONS)

    def body(self, prompt: str | Sequence[Message], tokens: int) -> dict[str, Any]:
        """A streamed, greedy request that is answered with exactly so many tokens where the server knows `ignore_eos`
        (vLLM and what is made of it). The messages of a chat go to a chat's endpoint only."""
        assert self.chat or isinstance(prompt, str)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        fields = {
            "model": self.model,
            **({"messages": messages} if self.chat else {"prompt": prompt}),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return {name: value for name, value in fields.items() if name not in self.without}


def base_url(url: str) -> str:
    """With or without `/v1` at its end. Raises ConfigError."""
    found = url.strip().rstrip("/").removesuffix("/v1")
    if not found.startswith(("http://", "https://")):
        raise ConfigError([f"--base-url {url}: write it as http://127.0.0.1:8000/v1."])
    return found


async def find_endpoint(
    url: str, model: str = "", headers: Mapping[str, str] | None = None, chat: bool = False
) -> Endpoint:
    """Look at the server's `/v1/models`; the first of them where none is named. Raises ConfigError where it does not
    serve that model, and Unavailable where it does not answer."""
    base, headers = base_url(url), dict(headers or {})
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as http:
            answer = await http.get(f"{base}/v1/models", headers=headers)
            answer.raise_for_status()
            served = [str(card["id"]) for card in answer.json()["data"]]
    except httpx.HTTPStatusError as error:
        raise Unavailable(
            f"{base}/v1/models answers {error.response.status_code}: is a key missing?"
        ) from None
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise Unavailable(f"{base}/v1/models does not answer as OpenAI's API does: {error!r}") from None
    if model and model not in served:
        raise ConfigError([f"{base} does not serve {model}: it has {', '.join(served) or 'no model'}."])
    if not served:
        raise Unavailable(f"{base} serves no model yet.")
    return Endpoint(base, model or served[0], headers, chat)


class Prompts:
    """Prompts of a given length, each different from its first words on, so that no prefix cache has seen it."""

    def __init__(self, tokens_per_word: float, seed: int | str) -> None:
        self.tokens_per_word = tokens_per_word
        self._random = Random(seed)

    def of(self, tokens: int) -> str:
        """About so many tokens, at least one word."""
        return " ".join(self.words(max(1, round(tokens / self.tokens_per_word))))

    def words(self, count: int) -> Iterator[str]:
        return (_WORD.format(self._random.randrange(10_000)) for _ in range(count))


async def learn_prompts(endpoint: Endpoint, seed: int) -> Prompts:
    """Ask once, to learn how many tokens of this model a word is. Raises Unavailable with the server's words where it
    does not answer."""
    words = " ".join(Prompts(1.0, seed).words(_PROBE_WORDS))
    long, short = Exchange(endpoint.body(words, 1)), Exchange(endpoint.body("0000", 1))
    await asyncio.gather(endpoint.ask(long, 60.0), endpoint.ask(short, 60.0))
    for exchange in (long, short):
        if exchange.error:
            raise Unavailable(f"{endpoint.url} does not answer a first request: {exchange.error}")
    tokens = long.prompt_tokens - short.prompt_tokens
    if tokens <= 0:  # it tells no usage
        return Prompts(2.0, seed)
    return Prompts(tokens / (_PROBE_WORDS - 1), seed)
