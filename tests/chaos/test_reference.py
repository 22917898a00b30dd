"""Right answers, asked of a server whose answers depend, or do not, on who asks beside."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from pdserve_bench.chaos.cases import Case
from pdserve_bench.chaos.client import Client
from pdserve_bench.chaos.reference import POOL, http, learn

from pdserve.errors import Unavailable

Answer = Callable[[dict[str, Any]], list[int]]


@asynccontextmanager
async def _client(answer: Answer) -> AsyncIterator[Client]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split("\r\n")[0])
        asked = json.loads(await reader.readexactly(length))
        text = json.dumps({"choices": [{"token_ids": answer(asked)}]})
        if asked["stream"]:
            text = f"data: {text}\n\ndata: [DONE]\n\n"
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        async with http() as client:
            yield Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "demo", client)
    finally:
        server.close()


def _prompt(asked: dict[str, Any]) -> int:
    return int(asked["prompt"][0])


def _beside(asked: dict[str, Any]) -> bool:
    return str(asked["cache_salt"]).startswith("b")


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (lambda asked: [_prompt(asked), 1], POOL),
        (lambda asked: [_prompt(asked), int(_beside(asked) and _prompt(asked) % 3 == 0)], POOL - POOL // 3),
    ],
    ids=["always the same", "every third one differs in a batch"],
)
async def test_only_what_has_one_answer_is_used(answer: Answer, kept: int) -> None:
    async with _client(answer) as client:
        pool = await learn(client, (Case((n,), 2, n % 2 == 0, salt=f"1-{n}") for n in count()), 5)
    assert len(pool) == kept
    assert [case.expected for case in pool] == [(case.prompt[0], 0 if kept < POOL else 1) for case in pool]


async def test_an_engine_that_disagrees_with_itself_is_no_yardstick() -> None:
    async with _client(lambda asked: [int(_beside(asked))]) as client:
        with pytest.raises(Unavailable, match="30 of 30 prompts get another answer"):
            await learn(client, (Case((n,), 1, True, salt=str(n)) for n in count()), 5)
