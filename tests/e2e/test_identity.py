"""Greedy output through the graph is token for token what one plain engine says."""

import asyncio

import pytest
from pdserve_bench.client import Exchange, LoadClient

from tests.e2e.cases import LENGTHS, LOCAL_LIMIT, Case
from tests.e2e.graph import Graph

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


async def complete(graph: Graph, case: Case, *, stream: bool, salt: str | None = None) -> Exchange:
    """`salt` keeps a request away from what the prefix caches hold of earlier tests."""
    body: dict[str, object] = {
        "model": "demo",
        "prompt": case.prompt,
        "max_tokens": case.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    exchange = Exchange(body if salt is None else {**body, "cache_salt": salt})
    await LoadClient(graph.url).ask(exchange, 300)
    assert not exchange.error, exchange.error
    return exchange


def test_a_plain_engine_agrees_with_itself(plain_engine: dict[str, list[list[int]]]) -> None:
    """The ground that all tests below stand on: what else is in the batch does not change a plain engine's answer."""
    assert plain_engine["together"] == plain_engine["alone"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("length", LENGTHS)
async def test_every_length(
    graph: Graph, cases: list[Case], reference: dict[str, list[int]], length: int, stream: bool
) -> None:
    case = next(case for case in cases if case.name == f"length-{length}")
    answer = await complete(graph, case, stream=stream, salt=f"{length}-{stream}")
    assert answer.tokens == reference[case.name]
    assert answer.prefill == ("remote" if length > LOCAL_LIMIT else "local")


async def test_prefix_hits(graph: Graph, cases: list[Case], reference: dict[str, list[int]]) -> None:
    by_name = {case.name: case for case in cases}
    expected = {"prefix-first": "remote", "prefix-short-rest": "local", "prefix-long-rest": "remote"}
    for name, prefill in expected.items():
        answer = await complete(graph, by_name[name], stream=False)
        assert answer.tokens == reference[name], name
        assert answer.prefill == prefill, name


async def test_many_at_once(graph: Graph, cases: list[Case], reference: dict[str, list[int]]) -> None:
    jobs = [(case, stream) for case in cases for stream in (False, True)]
    answers = await asyncio.gather(
        *(complete(graph, case, stream=stream, salt=f"many-{i}") for i, (case, stream) in enumerate(jobs))
    )
    wrong = [
        case.name
        for (case, _), answer in zip(jobs, answers, strict=True)
        if answer.tokens != reference[case.name]
    ]
    assert wrong == []
    assert {answer.prefill for answer in answers} == {"local", "remote"}
