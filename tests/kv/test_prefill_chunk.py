"""What vLLM's scheduler reads of its configuration before each step."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from pdserve.kv.prefill_chunk import MAX_SHORT_STEPS, PrefillChunk

BLOCK = 32


@dataclass
class Request:
    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0


class Steps:
    def __init__(self, usual: int = 256) -> None:
        self.config = SimpleNamespace(long_prefill_token_threshold=usual)
        self.chunk = PrefillChunk(self.config, BLOCK)
        self.prompts: list[Request] = []

    def prompt(self, tokens: int) -> None:
        self.prompts.append(Request(f"r{len(self.prompts)}", tokens))
        self.chunk.admitted(self.prompts[-1])

    def step(self) -> int:
        """Schedule a step; return the tokens of each prompt in it."""
        most = self.config.long_prefill_token_threshold
        tokens = {
            each.request_id: min(most, each.num_tokens - each.num_computed_tokens) for each in self.prompts
        }
        self.chunk.scheduled(tokens)
        for each in self.prompts:
            each.num_computed_tokens += tokens[each.request_id]
        return int(most)


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_each_prompt_has_the_usual_chunk(steps: Steps) -> None:
    for _ in range(2):
        steps.prompt(1000)
        assert [steps.step(), steps.step()] == [256, 256]


def test_a_limit_is_of_all_prompts_together(steps: Steps) -> None:
    steps.chunk.limit(400)
    steps.prompt(5000)
    assert [steps.step(), steps.step()] == [400, 400]
    steps.prompt(1000)
    assert [steps.step() for _ in range(4)] == [400, 200, 200, 200], (
        "of one that was not known before its first"
    )
    assert steps.step() == 400, "the second one is computed"
    steps.chunk.ended("r0")
    steps.chunk.limit(256)
    assert steps.step() == 256


def test_no_limit_is_below_a_block(steps: Steps) -> None:
    steps.prompt(2000)
    steps.chunk.limit(1)
    assert steps.step() == BLOCK
    steps.chunk.limit(BLOCK + 1)
    steps.prompt(2000)
    steps.step()
    assert steps.step() == BLOCK


def test_a_step_with_kv_that_comes_is_spared_but_not_for_ever(steps: Steps) -> None:
    steps.prompt(10_000)
    found = []
    for _ in range(2 * MAX_SHORT_STEPS + 2):
        steps.chunk.spare()
        found.append(steps.step())
    assert found == 2 * ([BLOCK] * MAX_SHORT_STEPS + [256])
    assert steps.step() == 256


def test_where_prompts_are_not_computed_in_chunks_nothing_changes() -> None:
    steps = Steps(0)
    steps.chunk.spare()
    steps.prompt(1000)
    assert [steps.step(), steps.step()] == [0, 0]
