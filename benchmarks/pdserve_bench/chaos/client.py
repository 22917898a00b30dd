"""One request, as a client of the HTTP API sends it, and all that can be seen of its answer."""

import asyncio
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from pdserve_bench.chaos.cases import Case


class Broken(Exception):
    """The answer is an error, or no answer as the API defines it; the text says which."""


@dataclass(eq=False)
class Exchange:
    """A request and what has come of it so far. Times are monotonic."""

    case: Case
    request_id: str = field(default_factory=lambda: f"chaos-{uuid.uuid4().hex[:12]}")
    """sent along, so that the logs can be searched for it even where no answer ever came"""
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    port: int = 0
    """the client's end of its connection, 0 while there is none"""
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """when each of them came, where it is streamed"""
    prefill: str = ""
    """`local` or `remote`, as the response header says"""
    instance: str = ""
    """who answered, as the response header says"""
    error: str = ""
    reset: bool = False
    """the connection was refused, or ended before the answer did"""
    hung: bool = False


class Client:
    """Each request goes on a connection of its own, so that the frontends share them."""

    def __init__(
        self, url: str, model: str, http: httpx.AsyncClient, headers: Mapping[str, str] | None = None
    ) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._http = http
        self._headers = dict(headers or {})

    async def ask(self, exchange: Exchange, patience: float) -> None:
        """Never fails: what goes wrong is told by the exchange. A request that does not end within
        `patience` seconds is given up."""
        try:
            async with asyncio.timeout(patience):
                await self._ask(exchange)
        except TimeoutError:
            exchange.hung, exchange.error = True, f"no end within {patience:g} s"
        except Broken as error:
            exchange.error = str(error)
        except httpx.TransportError as error:
            exchange.reset, exchange.error = True, f"connection: {str(error) or type(error).__name__}"
        except (ValueError, LookupError, TypeError) as error:
            exchange.error = f"an answer that cannot be read: {error!r}"
        finally:
            exchange.ended = time.monotonic()

    async def _ask(self, exchange: Exchange) -> None:
        async def trace(event: str, info: Mapping[str, Any]) -> None:
            if event == "connection.connect_tcp.complete":
                exchange.port = info["return_value"].get_extra_info("client_addr")[1]

        body = _body(self._model, exchange.case)
        options: dict[str, Any] = {
            "json": body,
            "extensions": {"trace": trace},
            "headers": {**self._headers, "connection": "close", "x-request-id": exchange.request_id},
        }
        async with self._http.stream("POST", self._url, **options) as response:
            exchange.prefill = response.headers.get("x-pdserve-prefill", "")
            exchange.instance = response.headers.get("x-pdserve-instance", "")
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise Broken(f"HTTP {response.status_code} {_message(text)}")
            if not exchange.case.stream:
                exchange.tokens = list(json.loads(await response.aread())["choices"][0]["token_ids"])
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    _take(exchange, json.loads(line[6:]))
        raise Broken("the stream ended without [DONE]")


def _body(model: str, case: Case) -> dict[str, object]:
    """Greedy and to the last token, so that there is one right answer; token ids, so that it can be told."""
    return {
        "model": model,
        "prompt": list(case.prompt),
        "max_tokens": case.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": case.stream,
        "return_token_ids": True,
        "cache_salt": case.salt,
    }


def _take(exchange: Exchange, event: Mapping[str, Any]) -> None:
    if "error" in event:
        raise Broken(f"in the stream: {_message(json.dumps(event))}")
    for choice in event["choices"]:
        if tokens := choice.get("token_ids"):
            exchange.tokens += tokens
            exchange.arrivals += [time.monotonic()] * len(tokens)


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"] or text)[:300]
    except (ValueError, LookupError, TypeError):
        return text[:300]
