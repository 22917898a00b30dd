"""How long the simulated engine's steps take, and what it puts into them."""

import time
from itertools import pairwise

import pytest

from pdserve.engine.sim.engine import SimEngine
from pdserve.engine.sim.model import SimModel, sim_model
from pdserve.engine.spec import EngineSpec
from pdserve.errors import ConfigError
from pdserve.records import Role
from tests.engine.sims import body, collect, sim, tokens

STEP = SimModel(
    step_seconds=0.01,
    sequence_seconds=0.002,
    context_seconds=0.003,
    prefill_rate=1000.0,
    attention_seconds=0.4,
)


@pytest.mark.parametrize(
    ("decoding", "context", "chunks", "seconds"),
    [
        (0, 0, [], 0.01),
        (1, 0, [], 0.012),
        (4, 2000, [], 0.01 + 4 * 0.002 + 2 * 0.003),
        (0, 0, [(0, 1000)], 0.01 + 0.002 + 1.0 + 0.4 * 0.5),
        (0, 0, [(1000, 1000)], 0.01 + 0.002 + 1.0 + 0.4 * 1.5),
        (2, 500, [(0, 100), (50, 10)], 0.01 + 4 * 0.002 + 0.0015 + 0.11 + 0.4 * (0.005 + 0.00055)),
    ],
)
def test_a_step_takes(decoding: int, context: int, chunks: list[tuple[int, int]], seconds: float) -> None:
    assert STEP.step_time(decoding, context, chunks) == pytest.approx(seconds)


def test_by_default_a_step_costs_its_base_and_its_prompt_tokens() -> None:
    """What it was before other things could be said of it."""
    model = SimModel()
    assert model.step_time(60, 90_000, [(500, 300), (0, 100)]) == pytest.approx(0.005 + 400 / 20_000)


def test_chunks_of_a_prompt_cost_what_the_whole_prompt_costs() -> None:
    whole = STEP.step_time(0, 0, [(0, 3000)])
    parts = sum(STEP.step_time(0, 0, [(before, 1000)]) for before in (0, 1000, 2000))
    assert parts == pytest.approx(whole + 2 * (0.01 + 0.002))


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("sequence-seconds", 0, ""),
        ("transfer-seconds", 0.0, ""),
        ("context-seconds", -1, "sim: context_seconds must be a number at least 0"),
        ("step-seconds", 0, "sim: step_seconds must be a number above 0"),
        ("attention-seconds", "1", "sim: attention_seconds must be a number at least 0"),
        ("kv-blocks", 1.5, "sim: kv_blocks must be a whole number above 0"),
        ("lease", True, "sim: lease must be a number above 0"),
        ("speed", 1, "sim: unknown key speed"),
    ],
)
def test_a_speed_is_nothing_only_where_that_is_the_default(key: str, value: object, problem: str) -> None:
    arguments = {"additional-config": {"sim": {key: value}}}
    if not problem:
        assert sim_model(arguments)
        return
    with pytest.raises(ConfigError, match=problem):
        sim_model(arguments)


def test_speeds_are_a_mapping() -> None:
    with pytest.raises(ConfigError, match="sim: a mapping"):
        sim_model({"additional-config": {"sim": 5}})


def engine(**speed: float) -> SimEngine:
    slow = {"prefill-rate": 1e6, "step-seconds": 0.001} | {
        key.replace("_", "-"): value for key, value in speed.items()
    }
    arguments = {"block-size": 16, "max-num-batched-tokens": 64, "additional-config": {"sim": slow}}
    return SimEngine(EngineSpec(Role.DECODE, "d", "demo", engine_args=arguments))


async def test_steps_keep_their_time_also_where_timers_are_coarse() -> None:
    """200 steps of 2.3 ms, which a timer of whole milliseconds makes 3 ms each."""
    async with engine(step_seconds=0.0023) as decode:
        began = time.monotonic()
        await decode.generate("r", [5] * 8, body(200), None)
        assert len(tokens(await collect(decode, "r"))) == 200
        took = time.monotonic() - began
    assert took >= 200 * 0.0023 - 0.001
    assert took < 200 * 0.0029, "unless the machine is very busy"


async def test_a_step_takes_what_is_in_it() -> None:
    """Two sequences of 200 tokens of context, then one: 0.05 and 0.025 s per token."""
    async with engine(sequence_seconds=0.01, context_seconds=0.075) as decode:
        await decode.generate("long", [5] * 200, body(8), None)
        await decode.generate("short", [6] * 200, body(4), None)
        seen: list[tuple[float, set[str]]] = []
        while len(seen) < 3 or "long" in seen[-1][1]:
            step = await decode.step()
            seen.append((time.monotonic(), {output.request_id for output in step.outputs}))
            if any(output.finished and output.request_id == "long" for output in step.outputs):
                break
    both = [after[0] - before[0] for before, after in pairwise(seen) if len(after[1]) == 2 == len(before[1])]
    alone = [after[0] - before[0] for before, after in pairwise(seen) if after[1] == {"long"} == before[1]]
    assert 0.045 < min(both) < 0.1
    assert 0.02 < min(alone) < 0.045


async def test_a_prompt_that_waits_finds_the_prefix_of_those_before_it() -> None:
    """The budget of a step is 64 tokens: the second prompt is admitted with the last chunk of the first."""
    prompt = list(range(3, 203))
    async with sim(Role.DECODE, "d", max_num_batched_tokens=64) as decode:
        await decode.generate("first", prompt, body(2), None)
        await decode.generate("second", [*prompt, 7], body(2), None)
        cached: dict[str, int] = {}
        while len(cached) < 2:
            for output in (await decode.step()).outputs:
                if (stats := output.raw.prefill_stats) is not None:
                    cached[output.request_id] = stats.num_cached_tokens
    assert cached == {"first": 0, "second": 192}
