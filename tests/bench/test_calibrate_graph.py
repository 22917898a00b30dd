"""Calibrated against a graph of simulated engines as users run it: the speeds that its file names are found."""

import asyncio
import os

import pytest
from pdserve_bench.compare.calibrate import EngineLimits, EngineSpeed, learn_speed
from pdserve_bench.progress import Schedule
from pdserve_bench.simulated import simulated
from pdserve_bench.systems.system import GraphSystem

from pdserve.engine.sim.model import sim_model

SPEED = {
    "step-seconds": 0.02,
    "sequence-seconds": 0.002,
    "context-seconds": 0.002,
    "prefill-rate": 4000,
    "attention-seconds": 0.1,
    "transfer-seconds": 0.15,
    "bandwidth": 1.5e7,
}
WHOLE = {"long-prefill-token-threshold": 0}
"""prompts are computed in one step beside others, not in chunks"""
LIMITS = EngineLimits(max_model_len=2200, max_num_seqs=16)
SLOWED = 1.3 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
"""how many times as long a step may seem to take here"""
Found = tuple[EngineSpeed, float]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """And the seconds that remained when the phases were through."""

    async def measure() -> Found:
        folder = tmp_path_factory.mktemp("graph")
        schedule = Schedule()
        limits = {"max-num-seqs": LIMITS.max_num_seqs}
        async with GraphSystem("known", simulated(SPEED, common=limits, decode=WHOLE)).start(
            folder, print
        ) as graph:
            speed = await learn_speed(graph, schedule, LIMITS, remote=True, seconds=10)
            return speed, schedule.seconds_left

    return asyncio.run(measure())


def test_steps_take_what_they_take(found: Found) -> None:
    """Within 30 %, and longer on a machine that does other things as well."""
    model, known = found[0].model, sim_model({"additional-config": {"sim": SPEED}})
    for count, context in ((1, 50), (4, 200), (16, 800), (8, 16_000)):
        assert 0.7 < model.step_time(count, context) / known.step_time(count, context) < SLOWED
    for tokens in (256, 1024, 2048):
        wanted = known.step_time(4, 200, [(0, tokens)])
        assert 0.7 < model.step_time(4, 200, [(0, tokens)]) / wanted < SLOWED
    assert found[0].error < 0.5


def test_a_remote_prefill_costs_its_transfer(found: Found) -> None:
    """And some milliseconds on the way, of this machine."""
    model = found[0].model
    assert 0.1 < model.transfer_seconds < 0.35
    assert model.bytes_per_token / model.bandwidth == pytest.approx(4096 / 1.5e7, rel=0.35)


def test_its_time_is_announced(found: Found) -> None:
    assert found[1] == 0


def test_all_that_was_measured_is_told(found: Found) -> None:
    speed = found[0]
    assert {point.name.split()[0] for point in speed.points} == {"TTFT", "ITL", "gap"}
    assert speed.errors().keys() == {point.name for point in speed.points}
    assert "fit error" in speed.describe()
    again = sim_model({"additional-config": {"sim": speed.speeds()}})
    assert (again.block_size, again.kv_blocks) == (32, 2048), "as large as the engine that was asked"
