"""How long the simulated engine's steps take, and what they contain."""

import time
from contextlib import nullcontext

import pytest

from pdserve.contract.records import Role
from pdserve.engine.sim.engine import SimEngine
from pdserve.engine.sim.model import SimModel, sim_model
from pdserve.engine.spec import EngineSpec
from pdserve.util.errors import ConfigError
from tests.engine.sims import body, sim

MODEL = SimModel(
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
def test_step_time(decoding: int, context: int, chunks: list[tuple[int, int]], seconds: float) -> None:
    assert MODEL.step_time(decoding, context, chunks) == pytest.approx(seconds)


def test_a_chunk_follows_two_short_steps_for_kv() -> None:
    """In steps with KV that was read, a prompt gets one block twice, and then a whole chunk."""
    model = SimModel(prompt_chunk=256, block_size=16)
    assert [model.chunk(256, 1, with_kv) for with_kv in range(5)] == [256, 16, 16, 256, 16]


@pytest.mark.parametrize(
    ("speeds", "problem"),
    [
        ({"sequence-seconds": 0, "transfer-seconds": 0.0}, ""),
        ({"context-seconds": -1}, "sim: context_seconds must be a number at least 0"),
        ({"step-seconds": 0}, "sim: step_seconds must be a number above 0"),
        ({"attention-seconds": "1"}, "sim: attention_seconds must be a number at least 0"),
        ({"kv-blocks": 1.5}, "sim: kv_blocks must be a whole number above 0"),
        ({"lease": True}, "sim: lease must be a number above 0"),
        ({"speed": 1}, "sim: unknown key speed"),
        (5, "sim: a mapping"),
    ],
)
def test_only_speeds_with_a_default_of_zero_may_be_zero(speeds: object, problem: str) -> None:
    arguments = {"additional-config": {"sim": speeds}}
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        assert sim_model(arguments)


async def test_steps_keep_their_pace_with_coarse_timers() -> None:
    """A timer of whole milliseconds would make these steps of 2.3 ms take 3 ms. On a busy machine, some take longer."""
    async with sim(Role.DECODE, "d", **{"step-seconds": 0.0023}) as decode:
        began = time.monotonic()
        await decode.generate("r", [5] * 8, body(200), None)
        ended = []
        for _ in range(200):
            await decode.step()
            ended.append(time.monotonic())
    assert ended[-1] - began >= 200 * 0.0023 - 0.001
    assert min(later - earlier for earlier, later in zip(ended, ended[20:], strict=False)) < 20 * 0.0029


async def test_the_time_of_a_step_follows_from_its_contents() -> None:
    speeds = {"step-seconds": 0.001, "sequence-seconds": 0.002, "context-seconds": 0.015, "prefill-rate": 1e6}
    arguments = {"block-size": 16, "additional-config": {"sim": speeds}}
    async with SimEngine(EngineSpec(Role.DECODE, "d", "demo", engine_args=arguments)) as decode:
        await decode.generate("long", [5] * 200, body(5), None)
        await decode.generate("short", [6] * 200, body(3), None)
        ended: set[str] = set()
        while len(ended) < 2:
            ended |= {output.request_id for output in (await decode.step()).outputs if output.finished}
        prompts = 0.001 + 2 * 0.002 + 400 / 1e6
        both = 2 * (0.001 + 2 * 0.002) + (402 + 404) / 1000 * 0.015
        alone = 2 * (0.001 + 0.002) + (203 + 204) / 1000 * 0.015
        assert decode.cpu_seconds() == pytest.approx(prompts + both + alone)


async def test_a_waiting_prompt_hits_the_prefix_of_earlier_prompts() -> None:
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
