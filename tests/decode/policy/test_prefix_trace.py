"""Prompts of a simulated load go where their prefixes are, in virtual time."""

from random import Random

from tests.decode.virtual import Figures
from tests.decode.virtual_prefixes import PrefixGraph, one_cache


def documents(count: int, questions: int, rate: float) -> list[tuple[float, int, int, list[int]]]:
    """Questions about documents of 10,240 tokens, in random order, at regular times. All prompts begin alike."""
    order = [document for document in range(count) for _ in range(questions)]
    Random(1).shuffle(order)
    return [
        (number / rate, 10_340, 20, [-1, *range(20 * document, 20 * document + 19)])
        for number, document in enumerate(order)
    ]


def test_four_workers_find_nearly_what_one_cache_of_their_total_size_finds() -> None:
    trace = documents(30, 12, rate=8.0)
    blind, found = (PrefixGraph(by_prefix=by_prefix, blocks=200) for by_prefix in (False, True))
    before, after = Figures.of(blind.replay(trace)), Figures.of(found.replay(trace))
    assert found.hits > 0.9 * one_cache(trace, 800)
    assert found.hits > 1.5 * blind.hits
    assert after.ttft50 < 0.5 * before.ttft50
    assert after.ttft99 < before.ttft99
    assert found.missed < 0.05 * len(trace)


def test_nothing_changes_if_nothing_is_shared() -> None:
    nothing: list[int] = []
    trace = [(at, prompt, tokens, nothing) for at, prompt, tokens, _ in documents(20, 5, rate=8.0)]
    graphs = [PrefixGraph(by_prefix=by_prefix, blocks=200) for by_prefix in (False, True)]
    assert Figures.of(graphs[0].replay(trace)) == Figures.of(graphs[1].replay(trace))
