"""KV in host memory, and on disk, beside caches that hold a part of the conversations: the answers are those of one
plain engine. (Also when a worker is killed: `pdserve chaos --only offload`.)"""

import json
import os
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

import httpx
import psutil
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


ON_DISK = {"kv-offload": "20MiB", "kv-offload-disk": "256MiB"}
"""host memory for 5,120 tokens, of which a request may have 4,096"""


@pytest.fixture(scope="module", params=[{"kv-offload": "256MiB"}, ON_DISK], ids=["host", "disk"])
def offloading(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    reference: dict[str, list[int]],
) -> Iterator[RealGraph]:
    del reference  # first, as for the other graph
    yaml = GRAPH.format(port=free_port("127.0.0.1"), kv_port=free_port("127.0.0.1", 2), decode=1, prefill=1)
    keys = {"num-gpu-blocks-override": BLOCKS, **request.param}
    yaml = yaml.replace("Common:", "\n  ".join(["Common:", *(f"{key}: {keys[key]}" for key in keys)]))
    yaml = yaml.replace("dtype]", f"dtype, {', '.join(keys)}]")
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


def loaded(graph: RealGraph) -> tuple[float, float]:
    """Prompt tokens whose KV came from host memory, and from disk."""
    metrics, name = graph.metrics(), "vllm:prompt_tokens_cached_by_source_total"
    return metrics(name, source="host"), metrics(name, source="disk")


def workers(graph: RealGraph) -> list[dict[str, Any]]:
    instances = json.loads(graph.pdserve("status", "--json").stdout)["instances"]
    return [each for each in instances if each["kv_tokens"]]


def files_on_disk(graph: RealGraph) -> Iterator[int]:
    """The open files of the engines that have no name."""
    for worker in workers(graph):
        for process in psutil.Process(worker["pid"]).children(recursive=True):
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                where = os.readlink(link)
                if where.startswith(graph.env["PDSERVE_STATE_DIR"]) and where.endswith(" (deleted)"):
                    file = os.open(link, os.O_RDWR)
                    yield file
                    os.close(file)


async def test_conversations_that_were_evicted_come_back(
    offloading: RealGraph, rounds: list[tuple[Case, list[int]]]
) -> None:
    ways = []
    for case, tokens in rounds:
        answer = await complete(offloading, case, stream=False)
        assert answer.tokens == tokens, case.name
        ways.append(answer.prefill)
    assert ways == ["remote"] * 8 + ["local"] * 8  # the decode worker knows what its host memory has
    host, disk = loaded(offloading)
    assert host + disk >= sum(len(case.prompt) // 32 * 32 for case in OPENINGS)
    (decode, prefill) = workers(offloading)
    assert (decode["host_tokens"], decode["disk_tokens"]) == (prefill["host_tokens"], prefill["disk_tokens"])
    if decode["disk_tokens"]:
        assert disk > host
        assert decode["disk_tokens"] > 8 * decode["kv_tokens"]
    else:
        assert (disk, decode["host_tokens"] > 8 * decode["kv_tokens"]) == (0, True)
    assert [name for each in (decode, prefill) for name in glob(f"/dev/shm/vllm_offload_{each['id']}*")] == []


async def test_more_at_once_than_the_caches_hold(
    offloading: RealGraph, cases: list[Case], reference: dict[str, list[int]]
) -> None:
    before = sum(loaded(offloading))
    for _ in range(2):
        answers = await all_at_once(offloading, cases)
        assert [name for name, answer in answers if answer.tokens != reference[name]] == []
    assert sum(loaded(offloading)) > before


async def test_what_is_damaged_on_disk_is_computed(
    offloading: RealGraph, rounds: list[tuple[Case, list[int]]]
) -> None:
    sizes = []
    for file in files_on_disk(offloading):
        sizes.append(os.fstat(file).st_size)
        os.pwrite(file, CHANCE.randbytes(sizes[-1]), 0)
    for case, tokens in rounds[8:]:
        assert (await complete(offloading, case, stream=False)).tokens == tokens, case.name
    failures = offloading.metrics()("vllm:kv_offload_tiering_promotion_job_failures_total")
    if all(each["disk_tokens"] for each in workers(offloading)):
        assert (len(sizes), min(sizes) > 0, failures > 0) == (2, True, True)
    else:
        assert (sizes, failures) == ([], 0)
