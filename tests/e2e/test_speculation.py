"""Two decode workers that look drafts up (n-gram), and a prefill worker without speculation: the answers are those of
one plain engine without it, also when one of the decode workers is killed in the middle of them."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import httpx
import pytest
from pdserve_bench.client import Exchange, LoadClient

from pdserve.ports import free_port
from tests.conditions import until
from tests.e2e.cases import Case
from tests.e2e.graph import RealGraph, serving
from tests.e2e.test_identity import all_at_once
from tests.real import GRAPH, KEY, Reference

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

SPECULATION = "{method: ngram, num_speculative_tokens: 4, prompt_lookup_min: 1, prompt_lookup_max: 4}"
TOKENS = 800


@pytest.fixture(scope="module")
def drafting(
    tmp_path_factory: pytest.TempPathFactory, reference: dict[str, list[int]]
) -> Iterator[RealGraph]:
    del reference  # first, as for the other graph
    yaml = GRAPH.format(port=free_port("127.0.0.1"), kv_port=free_port("127.0.0.1", 2), decode=2, prefill=1)
    yaml = yaml.replace("VllmWorker:", f"VllmWorker:\n  speculative-config: {SPECULATION}")
    with serving(yaml, tmp_path_factory.mktemp("drafting")) as graph:
        yield graph


async def test_every_case(drafting: RealGraph, cases: list[Case], reference: dict[str, list[int]]) -> None:
    answers = await all_at_once(drafting, cases)
    assert [name for name, answer in answers if answer.tokens != reference[name]] == []
    assert {answer.prefill for _, answer in answers} == {"local", "remote"}
    metrics = drafting.metrics()
    assert metrics("vllm:spec_decode_num_accepted_tokens_total") > 0
    slow = {"timeout", "expired"}  # the machine was busy
    assert metrics.values("pdserve_remote_prefill_failures_total", "reason") <= slow


async def test_a_decode_worker_is_killed_in_the_middle(
    drafting: RealGraph, cases: list[Case], vllm_server: Reference
) -> None:
    long = [Case(case.name, case.prompt, TOKENS) for case in cases if case.name[-3:] in ("-33", "300", "000")]
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=vllm_server.url, headers=headers, timeout=300) as client:
        asked = [client.post("/v1/completions", json=case.body()) for case in long]
        plain = [answer.json()["choices"][0]["token_ids"] for answer in await asyncio.gather(*asked)]
    before = drafting.metrics()("pdserve_migrations_total")
    state = json.loads(drafting.pdserve("status", "--json").stdout)
    pid = next(instance["pid"] for instance in state["instances"] if instance["role"] == "decode")
    exchanges = [Exchange(case.body(stream=True, cache_salt="killed")) for case in long]
    load = LoadClient(drafting.url)
    asking = [asyncio.create_task(load.ask(exchange, 300)) for exchange in exchanges]
    await until(lambda: min(len(exchange.tokens) for exchange in exchanges) >= 40, 120)
    assert not any(task.done() for task in asking)
    os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*asking)
    assert [exchange.error for exchange in exchanges if exchange.error] == []
    assert [exchange.tokens == tokens for exchange, tokens in zip(exchanges, plain, strict=True)] == [
        True
    ] * len(long)
    assert drafting.metrics()("pdserve_migrations_total") > before


async def test_sampling_beside_greedy_answers(drafting: RealGraph, cases: list[Case]) -> None:
    """top_k and temperatures of a batch belong to each request's own drafts."""
    url = f"{drafting.url}/v1/completions"
    kinds: tuple[dict[str, object], ...] = (
        {},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.3, "top_k": 1},
        {"temperature": 0.7, "top_p": 0.9},
    )
    async with httpx.AsyncClient(timeout=300) as client:
        asked = [client.post(url, json=case.body(**more)) for case in cases[:8] for more in kinds]
        answers = [answer.raise_for_status().json() for answer in await asyncio.gather(*asked)]
    tokens = [answer["choices"][0]["token_ids"] for answer in answers]
    assert {len(each) for each in tokens} == {24}
    for greedy, one, other in zip(tokens[::4], tokens[1::4], tokens[2::4], strict=True):
        assert greedy == one == other
