"""Prompts and expected outputs: computed, or learnt from a server whose outputs may depend on the batch."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from pdserve_bench.chaos.questions import (
    MAX_OUTPUT,
    POOL,
    Case,
    again,
    computed,
    disagreement,
    endless,
    learn,
    prompt_lengths,
    simulated,
)
from pdserve_bench.client import LoadClient

from pdserve.config.load import load
from pdserve.util.errors import Unavailable
from tests.bench.answers import DONE, STREAM, Asked, event, tiny_server, whole

YAML = """
Common: {model: demo}
Frontend: {served_model_name: demo}
VllmWorker: {engine: sim, remote-prefill: true, max-local-prefill-length: 100, common-configs: [model]}
PrefillWorker: {engine: sim, common-configs: [model]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "graph.yaml"
    path.write_text(YAML)
    return path


@pytest.mark.parametrize("max_model_len", [300, 1024, 8192])
def test_prompts_are_short_or_long_and_no_two_are_equal(file: Path, max_model_len: int) -> None:
    cases = list(islice(endless(prompt_lengths(load(file, {}), max_model_len), 1), 60))
    lengths = {len(case.prompt) for case in cases}
    assert min(lengths) <= 100 < max(lengths)
    assert max(len(case.prompt) + case.max_tokens for case in cases) < max_model_len
    assert len({case.prompt for case in cases}) == 60
    assert len({case.salt for case in cases}) == 41
    documents = [case.prompt[: max(lengths) // 2] for case in cases if case.salt.endswith("documents")]
    assert (len(documents), len(set(documents))) == (20, 4)
    assert {case.stream for case in cases} == {True, False}
    assert max(case.max_tokens for case in cases) <= MAX_OUTPUT


def test_only_outputs_of_simulated_engines_are_computed(file: Path) -> None:
    model = simulated(load(file, {}))
    assert model is not None
    case = next(endless(prompt_lengths(load(file, {}), 1024), 1))
    answer = computed(case, model)
    assert len(answer) == case.max_tokens
    rest = replace(case, prompt=case.prompt + answer[:5], max_tokens=case.max_tokens - 5)
    assert answer[5:] == computed(rest, model)
    other = replace(case, prompt=(case.prompt[0] + 1, *case.prompt[1:]))
    assert computed(other, model)[-8:] != answer[-8:], "tokens depend on the first prompt token too"
    file.write_text(YAML.replace("PrefillWorker: {engine: sim", "PrefillWorker: {engine: vllm"))
    assert simulated(load(file, {})) is None


def test_a_pool_is_repeated_with_new_salts(file: Path) -> None:
    pool = list(islice(endless(prompt_lengths(load(file, {}), 1024), 1), 3))
    found = list(islice(again(pool), 9))
    assert [case.prompt for case in found] == [case.prompt for case in pool] * 3
    assert len({(case.salt, case.prompt) for case in found}) == 9
    assert len({case.salt for case in found[::3]}) == 3


Answer = Callable[[dict[str, Any]], list[int]]


@asynccontextmanager
async def _client(answer: Answer) -> AsyncIterator[LoadClient]:
    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        found = {"choices": [{"token_ids": answer(asked.body)}]}
        writer.write(STREAM + event(found) + DONE if asked.body["stream"] else whole(found))

    async with tiny_server(respond) as server:
        yield LoadClient(server.url)


def _prompt(asked: dict[str, Any]) -> int:
    return int(asked["prompt"][0])


def _beside(asked: dict[str, Any]) -> bool:
    return str(asked["cache_salt"]).startswith("b")


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (lambda asked: [_prompt(asked), 1], POOL),
        (lambda asked: [_prompt(asked), int(_beside(asked) and _prompt(asked) % 3 == 0)], POOL - POOL // 3),
    ],
    ids=["one output each", "every third prompt has another output in a batch"],
)
async def test_only_prompts_with_one_output_are_used(answer: Answer, kept: int) -> None:
    async with _client(answer) as client:
        pool = await learn(client, "demo", (Case((n,), 2, n % 2 == 0, salt=f"1-{n}") for n in count()), 5)
    assert len(pool) == kept
    assert [case.expected for case in pool] == [(case.prompt[0], 0 if kept < POOL else 1) for case in pool]


@pytest.mark.parametrize(
    ("left_out", "dtype", "amiss"),
    [
        (0, "float32", False),
        (1, "float32", False),
        (2, "float32", True),
        (14, "bfloat16", False),
        (14, None, False),
    ],
)
def test_in_float32_at_most_one_prompt_may_be_left_out(left_out: int, dtype: str | None, amiss: bool) -> None:
    assert bool(disagreement(left_out, dtype)) is amiss


async def test_an_engine_whose_output_depends_on_the_batch_is_no_reference() -> None:
    async with _client(lambda asked: [int(_beside(asked))]) as client:
        with pytest.raises(Unavailable, match="30 of 30 prompts have another output"):
            await learn(client, "demo", (Case((n,), 1, True, salt=str(n)) for n in count()), 5)
