"""With KV in host memory and on disk, and prefix caches too small for all conversations, a graph generates the tokens
of one plain engine. (`pdserve chaos --only offload` also kills workers.)"""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from tests.e2e.cases import Case, tokens_of
from tests.e2e.graph import RealGraph, serving
from tests.e2e.test_identity import all_at_once, complete
from tests.real import Reference, graph_yaml

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
CHANCE = random.Random(84)
OPENINGS = [
    Case(f"user-{user}", [CHANCE.randrange(20, 600) for _ in range(1200 + 64 * user)]) for user in range(8)
]
"""11,392 tokens together."""
BLOCKS = "num-gpu-blocks-override: 140"
"""KV blocks per worker: 4,480 tokens; a request may have 4,096."""
FRONTEND = "Frontend:\n  max-wait: 600\n"
"""600 s, because a busy machine must not refuse requests that wait."""
DECODE = f"VllmWorker:\n  {BLOCKS}\n  kv-offload: 20MiB\n  kv-offload-disk: 32MiB\n"
"""Host memory holds 5,120 tokens. The disk holds 8,192: the last five users' openings."""
PREFILL = f"PrefillWorker:\n  {BLOCKS}\n  kv-offload: 256MiB\n"


@pytest.fixture(scope="module")
def offloading(
    tmp_path_factory: pytest.TempPathFactory, reference: dict[str, list[int]]
) -> Iterator[RealGraph]:
    del reference  # the plain engine runs first
    yaml = graph_yaml().replace("Frontend:\n", FRONTEND)
    yaml = yaml.replace("VllmWorker:\n", DECODE).replace("PrefillWorker:\n", PREFILL)
    with serving(yaml, tmp_path_factory.mktemp("offloading")) as graph:
        yield graph


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rounds(vllm_server: Reference) -> list[list[tuple[Case, list[int]]]]:
    """Two rounds of prompts, one of each user, with a plain engine's outputs. A user's second prompt continues the
    first response."""
    found = []
    async with vllm_server.client() as client:
        asked = OPENINGS
        for number in range(2):
            said = [await tokens_of(client, case, cache_salt=f"{number} {case.name}") for case in asked]
            found.append(list(zip(asked, said, strict=True)))
            asked = [  # then 40 tokens of the user's own prompt again
                replace(case, prompt=[*case.prompt, *tokens, *case.prompt[600:640]])
                for case, tokens in found[-1]
            ]
    return found


async def prefill_modes(graph: RealGraph, asked: list[tuple[Case, list[int]]]) -> list[str]:
    """Send the requests one after another, check the tokens, and return how each prompt was prefilled."""
    answers = [await complete(graph, case, stream=False) for case, _ in asked]
    assert [answer.tokens for answer in answers] == [tokens for _, tokens in asked]
    return [answer.prefill for answer in answers]


def loaded_tokens(graph: RealGraph, worker: str, source: str) -> float:
    """Prompt tokens whose KV this worker loaded from `host` memory or `disk`."""
    return graph.metrics()("vllm:prompt_tokens_cached_by_source_total", source=source, instance=worker)


def workers(graph: RealGraph) -> list[dict[str, Any]]:
    """The decode worker and the prefill worker."""
    instances = json.loads(graph.pdserve("status", "--json").stdout)["instances"]
    return [each for each in instances if each["kv_tokens"]]


def deleted_files(worker: dict[str, Any], folder: str) -> Iterator[int]:
    """Yield descriptors of files that were deleted from this folder and that the engine still has open."""
    for process in psutil.Process(worker["pid"]).children(recursive=True):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            where = os.readlink(link)
            if where.startswith(folder) and where.endswith(" (deleted)"):
                file = os.open(link, os.O_RDWR)
                yield file
                os.close(file)


async def test_evicted_conversations_are_loaded_again(
    offloading: RealGraph, rounds: list[list[tuple[Case, list[int]]]]
) -> None:
    """The decode worker has the last conversations in host memory or on disk and prefills them locally. The prefill
    worker has the others in host memory."""
    decode, prefill = workers(offloading)
    assert (decode["host_tokens"], decode["disk_tokens"]) == (5120, 8192)
    assert (prefill["host_tokens"], prefill["disk_tokens"]) == (65536, 0)
    assert await prefill_modes(offloading, rounds[0]) == ["remote"] * 8
    found = await prefill_modes(offloading, rounds[1][::-1])
    assert found[:3] == ["local"] * 3
    assert found[-3:] == ["remote"] * 3
    assert loaded_tokens(offloading, decode["id"], "disk") > 0
    assert loaded_tokens(offloading, prefill["id"], "host") >= sum(
        len(case.prompt) // 32 * 32 for case in OPENINGS[:3]
    )
    assert [
        name for each in workers(offloading) for name in glob(f"/dev/shm/vllm_offload_{each['id']}*")
    ] == []


async def test_tokens_are_right_when_requests_exceed_the_caches(
    offloading: RealGraph, cases: list[Case], reference: dict[str, list[int]]
) -> None:
    for _ in range(2):
        answers = await all_at_once(offloading, cases)
        assert [name for name, answer in answers if answer.tokens != reference[name]] == []


async def test_blocks_that_are_damaged_on_disk_are_computed_again(
    offloading: RealGraph, rounds: list[list[tuple[Case, list[int]]]]
) -> None:
    last = rounds[1][3:]
    await prefill_modes(offloading, last)
    (decode, _), folder = workers(offloading), offloading.env["PDSERVE_STATE_DIR"]
    (size,) = [
        os.pwrite(file, CHANCE.randbytes(os.fstat(file).st_size), 0) for file in deleted_files(decode, folder)
    ]
    assert size > 0
    await prefill_modes(offloading, last)
    assert offloading.metrics()("vllm:kv_offload_tiering_promotion_job_failures_total") > 0
