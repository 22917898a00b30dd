"""KV in host memory beside caches that hold a part of the conversations: the answers are those of one plain engine.
(Also when a worker is killed: `pdserve chaos --only offload`.)"""

import json
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import httpx
import pytest
import pytest_asyncio

from pdserve.ports import free_port
from tests.e2e.cases import Case
from tests.e2e.graph import RealGraph, serving
from tests.e2e.test_identity import all_at_once, complete
from tests.real import GRAPH, KEY, Reference

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
BLOCKS = 140
"""of each cache: 4,480 tokens; a request may have 4,096"""
CHANCE = random.Random(84)
OPENINGS = [
    Case(f"user-{user}", [CHANCE.randrange(20, 600) for _ in range(1200 + 64 * user)]) for user in range(8)
]
"""12,000 tokens in all"""


@pytest.fixture(scope="module")
def offloading(
    tmp_path_factory: pytest.TempPathFactory, reference: dict[str, list[int]]
) -> Iterator[RealGraph]:
    del reference  # first, as for the other graph
    yaml = GRAPH.format(port=free_port("127.0.0.1"), kv_port=free_port("127.0.0.1", 2), decode=1, prefill=1)
    yaml = yaml.replace("Common:", f"Common:\n  num-gpu-blocks-override: {BLOCKS}\n  kv-offload: 256MiB")
    yaml = yaml.replace("dtype]", "dtype, num-gpu-blocks-override, kv-offload]")
    with serving(yaml, tmp_path_factory.mktemp("offloading")) as graph:
        yield graph


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rounds(vllm_server: Reference) -> AsyncIterator[list[tuple[Case, list[int]]]]:
    """Two questions of each user, the second with the first answer in its history, and a plain engine's answers."""
    headers = {"authorization": f"Bearer {KEY}"}
    found: list[tuple[Case, list[int]]] = []
    async with httpx.AsyncClient(base_url=vllm_server.url, headers=headers, timeout=300) as client:
        asked = OPENINGS
        for number in range(2):
            said = []
            for case in asked:
                answer = await client.post(
                    "/v1/completions", json=case.body(cache_salt=f"{number} {case.name}")
                )
                said.append(answer.raise_for_status().json()["choices"][0]["token_ids"])
            found += zip(asked, said, strict=True)
            asked = [
                replace(
                    case, prompt=[*case.prompt, *tokens, *case.prompt[600:640]]
                )  # of the user's own history
                for case, tokens in zip(asked, said, strict=True)
            ]
    yield found


def from_host(graph: RealGraph) -> float:
    """Prompt tokens whose KV came from host memory."""
    return graph.metrics()("vllm:prompt_tokens_cached_by_source_total", source="host")


async def test_conversations_that_were_evicted_come_back(
    offloading: RealGraph, rounds: list[tuple[Case, list[int]]]
) -> None:
    ways = []
    for case, tokens in rounds:
        answer = await complete(offloading, case, stream=False)
        assert answer.tokens == tokens, case.name
        ways.append(answer.prefill)
    assert ways == ["remote"] * 8 + ["local"] * 8  # the decode worker knows what its host memory has
    assert from_host(offloading) >= sum(len(case.prompt) // 32 * 32 for case in OPENINGS)
    (decode, prefill) = (
        each
        for each in json.loads(offloading.pdserve("status", "--json").stdout)["instances"]
        if each["kv_tokens"]
    )
    assert decode["host_tokens"] == prefill["host_tokens"] > 8 * decode["kv_tokens"]


async def test_more_at_once_than_the_caches_hold(
    offloading: RealGraph, cases: list[Case], reference: dict[str, list[int]]
) -> None:
    before = from_host(offloading)
    for _ in range(2):
        answers = await all_at_once(offloading, cases)
        assert [name for name, answer in answers if answer.tokens != reference[name]] == []
    assert from_host(offloading) > before
