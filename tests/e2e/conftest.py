"""The same prompts to the graph and to a plain engine."""

import asyncio

import httpx
import pytest

from tests.e2e.cases import Case, identity_cases
from tests.real import KEY, Reference


@pytest.fixture(scope="session")
def plain_engine(vllm_server: Reference) -> dict[str, list[list[int]]]:
    """What a plain vLLM engine says to every identity case: `alone`, and `together` in shared batches. No prefix is
    taken from its cache."""
    return asyncio.run(_ask(vllm_server))


async def _ask(server: Reference) -> dict[str, list[list[int]]]:
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=300) as client:
        alone = [await _tokens(client, case, f"alone {case.name}") for case in identity_cases()]
        jobs = (_tokens(client, case, f"together {case.name}") for case in identity_cases())
        return {"alone": alone, "together": await asyncio.gather(*jobs)}


async def _tokens(client: httpx.AsyncClient, case: Case, salt: str) -> list[int]:
    answer = await client.post("/v1/completions", json=case.body(cache_salt=salt))
    found: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
    return found


@pytest.fixture(scope="session")
def reference(plain_engine: dict[str, list[list[int]]]) -> dict[str, list[int]]:
    """Greedy tokens of a plain vLLM engine for every identity case, by the case's name."""
    return {case.name: ids for case, ids in zip(identity_cases(), plain_engine["alone"], strict=True)}


@pytest.fixture(scope="session")
def cases() -> list[Case]:
    return identity_cases()
