"""Greedy output through the graph equals that of one plain engine, token for token."""

import asyncio

import pytest
from pdserve_bench.client import Exchange, LoadClient

from tests.e2e.cases import LENGTHS, LOCAL_LIMIT, Case
from tests.e2e.graph import RealGraph

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


async def complete(graph: RealGraph, case: Case, *, stream: bool, salt: str | None = None) -> Exchange:
    """Send a case. `salt` prevents prefix hits from earlier tests."""
    body = case.body(stream=stream) if salt is None else case.body(stream=stream, cache_salt=salt)
    exchange = Exchange(body)
    await LoadClient(graph.url).ask(exchange, 300)
    assert not exchange.error, exchange.error
    return exchange


def test_a_plain_engine_agrees_with_itself(plain_engine: dict[str, list[list[int]]]) -> None:
    """The premise of the other tests: the batch does not change a plain engine's output."""
    assert plain_engine["together"] == plain_engine["alone"]


@pytest.mark.parametrize("length", LENGTHS)
async def test_prompts_of_every_length_get_the_same_tokens(
    graph: RealGraph, cases: list[Case], reference: dict[str, list[int]], length: int
) -> None:
    case = next(case for case in cases if case.name == f"length-{length}")
    answer = await complete(graph, case, stream=False, salt=f"{length}")
    assert answer.tokens == reference[case.name]
    assert answer.prefill == ("remote" if length > LOCAL_LIMIT else "local")


async def test_prompts_with_prefix_hits_get_the_same_tokens(
    graph: RealGraph, cases: list[Case], reference: dict[str, list[int]]
) -> None:
    by_name = {case.name: case for case in cases}
    expected = {"prefix-first": "remote", "prefix-short-rest": "local", "prefix-long-rest": "remote"}
    for name, prefill in expected.items():
        answer = await complete(graph, by_name[name], stream=False)
        assert answer.tokens == reference[name], name
        assert answer.prefill == prefill, name


async def test_parallel_requests_get_the_same_tokens(
    graph: RealGraph, cases: list[Case], reference: dict[str, list[int]]
) -> None:
    answers = await all_at_once(graph, cases)
    assert [name for name, answer in answers if answer.tokens != reference[name]] == []
    assert {answer.prefill for _, answer in answers} == {"local", "remote"}


async def all_at_once(graph: RealGraph, cases: list[Case]) -> list[tuple[str, Exchange]]:
    """Send all cases at once, each with and without streaming. Return the cases' names and responses."""
    jobs = [(case, stream) for case in cases for stream in (False, True)]
    answers = await asyncio.gather(
        *(complete(graph, case, stream=stream, salt=f"many-{i}") for i, (case, stream) in enumerate(jobs))
    )
    return [(case.name, answer) for (case, _), answer in zip(jobs, answers, strict=True)]
