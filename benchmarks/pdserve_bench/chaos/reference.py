"""Right answers of an engine that cannot be computed: its own, while nothing disturbs it."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, cycle, islice

import httpx

from pdserve.errors import Unavailable
from pdserve_bench.chaos.cases import Case
from pdserve_bench.chaos.client import Client, Exchange

POOL = 30
AT_ONCE = 8


async def learn(client: Client, cases: Iterator[Case], patience: float) -> list[Case]:
    """A pool of cases with answers. Each is asked twice, alone and beside others: where the numbers of a batch
    make the engine disagree with itself, no fault can be blamed, and the case is left out. Raises Unavailable
    where half of them are."""
    pool = list(islice(cases, POOL))
    alone = [await _answer(client, replace(case, salt=f"a{case.salt}"), patience) for case in pool]
    gate = asyncio.Semaphore(AT_ONCE)

    async def beside_others(case: Case) -> tuple[int, ...]:
        async with gate:
            return await _answer(
                client, replace(case, salt=f"b{case.salt}", stream=not case.stream), patience
            )

    together = await asyncio.gather(*map(beside_others, pool))
    sure = [
        replace(case, expected=one)
        for case, one, other in zip(pool, alone, together, strict=True)
        if one == other
    ]
    if 2 * len(sure) < len(pool):
        raise Unavailable(
            f"undisturbed, {len(pool) - len(sure)} of {len(pool)} prompts get another answer in a batch than "
            "alone: nothing can be compared. Run with --dtype float32."
        )
    return sure


async def answers(
    client: Client, pool: Sequence[Case], patience: float
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Of each prompt of the pool, asked now, under salts of their own. Raises Unavailable."""
    return {
        case.prompt: await _answer(client, replace(case, salt=f"c{case.salt}"), patience) for case in pool
    }


def again(pool: list[Case]) -> Iterator[Case]:
    """The pool for ever, each time under a salt that no prefix cache knows."""
    serial = count()
    return (replace(case, salt=f"{case.salt}-{next(serial)}") for case in cycle(pool))


async def _answer(client: Client, case: Case, patience: float) -> tuple[int, ...]:
    exchange = Exchange(case)
    await client.ask(exchange, patience)
    if exchange.error:
        raise Unavailable(f"the undisturbed graph failed a request: {exchange.error}")
    return tuple(exchange.tokens)


def http() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
