"""The chunk that vLLM's scheduler reads from its configuration before each step."""

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
        self.chunk.add(self.prompts[-1])

    def step(self) -> int:
        """Schedule a step; return its maximum of tokens of one prompt."""
        most = self.config.long_prefill_token_threshold
        tokens = {
            each.request_id: min(most, each.num_tokens - each.num_computed_tokens) for each in self.prompts
        }
        self.chunk.on_step(tokens)
        for each in self.prompts:
            each.num_computed_tokens += tokens[each.request_id]
        return int(most)


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_each_prompt_has_the_default_chunk(steps: Steps) -> None:
    for _ in range(2):
        steps.prompt(1000)
        assert [steps.step(), steps.step()] == [256, 256]


def test_a_limit_applies_to_all_prompts_together(steps: Steps) -> None:
    steps.chunk.set_limit(400)
    steps.prompt(5000)
    assert [steps.step(), steps.step()] == [400, 400]
    steps.prompt(1000)
    assert [steps.step() for _ in range(4)] == [400, 200, 200, 200], (
        "the second prompt is unknown before its first step"
    )
    assert steps.step() == 400, "the second prompt is computed"
    steps.chunk.remove("r0")
    steps.chunk.set_limit(256)
    assert steps.step() == 256


def test_no_limit_is_below_a_block(steps: Steps) -> None:
    steps.prompt(2000)
    steps.chunk.set_limit(1)
    assert steps.step() == BLOCK
    steps.chunk.set_limit(BLOCK + 1)
    steps.prompt(2000)
    steps.step()
    assert steps.step() == BLOCK


def test_steps_that_receive_kv_are_short_but_not_for_ever(steps: Steps) -> None:
    steps.prompt(10_000)
    found = []
    for _ in range(2 * MAX_SHORT_STEPS + 2):
        steps.chunk.shorten_next_step()
        found.append(steps.step())
    assert found == 2 * ([BLOCK] * MAX_SHORT_STEPS + [256])
    assert steps.step() == 256


def test_without_chunks_nothing_is_limited() -> None:
    steps = Steps(0)
    steps.chunk.shorten_next_step()
    steps.prompt(1000)
    assert [steps.step(), steps.step()] == [0, 0]
