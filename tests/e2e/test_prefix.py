"""With two prefill workers, later turns go to the worker that has the conversation's prefix, and generate the tokens of
one plain engine."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdserve.util.net import free_port
from tests.e2e.cases import Case, tokens_of
from tests.e2e.graph import RealGraph, serving
from tests.e2e.test_identity import complete
from tests.real import Reference, graph_yaml

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
CHANCE = random.Random(128)
OPENINGS = [Case(f"user-{user}", [CHANCE.randrange(20, 600) for _ in range(1500)]) for user in range(4)]
TWO = "PrefillWorker:\n  ServiceArgs: {workers: 2}\n"


@pytest.fixture(scope="module")
def two_prefill_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGraph]:
    yaml = re.sub("kv-port: [0-9]+", f"kv-port: {free_port('127.0.0.1', 3)}", graph_yaml())
    yaml = yaml.replace("conditional-disagg: true", "conditional-disagg: false").replace(
        "PrefillWorker:\n", TWO
    )
    with serving(yaml, tmp_path_factory.mktemp("prefix")) as graph:
        yield graph


async def test_later_turns_find_their_prefix_and_have_the_same_tokens(
    two_prefill_workers: RealGraph, vllm_server: Reference
) -> None:
    graph = two_prefill_workers
    asked = OPENINGS
    async with vllm_server.client() as client:
        for turn in range(3):
            later = []
            for case in asked:
                expected = await tokens_of(client, case, cache_salt=f"{turn} {case.name}")
                answer = await complete(graph, case, stream=True)
                assert answer.tokens == expected, (turn, case.name)
                assert answer.prefill == "remote"
                later.append(replace(case, prompt=[*case.prompt, *expected, *case.prompt[600:640]]))
            asked = later
    chosen = graph.metrics()("pdserve_prefill_total", mode="remote", reason="prefix-cached")
    assert chosen == 8, "both later turns of four conversations"
