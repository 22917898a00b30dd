"""Fixtures: the identity cases, and a plain engine's tokens for them."""

import asyncio

import pytest

from tests.e2e.cases import Case, identity_cases, tokens_of
from tests.real import Reference


@pytest.fixture(scope="session")
def plain_engine(vllm_server: Reference) -> dict[str, list[list[int]]]:
    """The outputs of a plain vLLM engine for every identity case, `alone` and `together` in batches, without prefix
    hits."""
    return asyncio.run(_ask(vllm_server))


async def _ask(server: Reference) -> dict[str, list[list[int]]]:
    async with server.client() as client:
        alone = [await tokens_of(client, case, cache_salt=f"alone {case.name}") for case in identity_cases()]
        jobs = (tokens_of(client, case, cache_salt=f"together {case.name}") for case in identity_cases())
        return {"alone": alone, "together": await asyncio.gather(*jobs)}


@pytest.fixture(scope="session")
def reference(plain_engine: dict[str, list[list[int]]]) -> dict[str, list[int]]:
    """Greedy tokens of a plain vLLM engine by case name."""
    return {case.name: ids for case, ids in zip(identity_cases(), plain_engine["alone"], strict=True)}


@pytest.fixture(scope="session")
def cases() -> list[Case]:
    return identity_cases()
