"""The fit finds the speeds of engines that are known, also in a graph as users run it."""

import random
from dataclasses import replace

import pytest
from pdserve_bench.compare.calibrate import EngineSpeed, EngineStep, SpeedPoint, fit

from pdserve.engine.sim.model import SimModel
from pdserve.errors import Unavailable

REAL = SimModel(
    step_seconds=0.006,
    sequence_seconds=0.0004,
    context_seconds=0.0003,
    prefill_rate=5000.0,
    attention_seconds=0.05,
)
OVERHEAD = 0.012


def points(model: SimModel, noise: float = 0.0, seed: int = 0) -> list[SpeedPoint]:
    dice = random.Random(seed)
    work = [(True, EngineStep(chunks=((0, tokens),))) for tokens in (32, 128, 384, 768, 1536, 3072)]
    work += [(False, EngineStep(count, 50 * count)) for count in (1, 2, 4, 8, 16, 32)]
    work += [(False, EngineStep(count, 2000 * count)) for count in (1, 4, 8)]
    work += [(False, EngineStep(4, 200, ((0, tokens),))) for tokens in (128, 512, 1024)]
    found = []
    for whole, step in work:
        point = SpeedPoint(str(step), (step,), 0.0, whole)
        seconds = point.predicted(model, OVERHEAD) * (1 + noise * dice.uniform(-1, 1))
        found.append(replace(point, seconds=seconds))
    return found


def near(found: EngineSpeed, real: SimModel, tolerance: float) -> None:
    model = found.model
    assert model.step_seconds == pytest.approx(real.step_seconds, rel=tolerance)
    assert model.sequence_seconds == pytest.approx(real.sequence_seconds, rel=tolerance)
    assert model.context_seconds == pytest.approx(real.context_seconds, rel=tolerance, abs=1e-6)
    for tokens in (100, 1000, 3000):
        wanted = real.step_time(0, 0, [(0, tokens)])
        assert model.step_time(0, 0, [(0, tokens)]) == pytest.approx(wanted, rel=tolerance)


def test_the_fit_of_exact_measurements_is_exact() -> None:
    found = fit(points(REAL))
    near(found, REAL, 1e-6)
    assert found.model.attention_seconds == pytest.approx(REAL.attention_seconds)
    assert found.overhead == pytest.approx(OVERHEAD)
    assert found.error < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_the_fit_withstands_noise_and_outliers(seed: int) -> None:
    measured = points(REAL, 0.03, seed)
    measured[3] = replace(measured[3], seconds=3 * measured[3].seconds)
    measured[9] = replace(measured[9], seconds=2 * measured[9].seconds)
    found = fit(measured)
    near(found, REAL, 0.25)
    assert found.error < 0.05
    name, error = found.worst
    assert name == measured[3].name
    assert error == pytest.approx(-0.667, abs=0.05)


def test_no_coefficient_is_negative() -> None:
    """Where long prompts cost less per token than short ones, and longer contexts nothing."""
    simple = replace(REAL, context_seconds=0.0, attention_seconds=0.0, sequence_seconds=0.0)
    measured = [
        replace(point, seconds=point.seconds * (0.9 if "3072" in point.name or "2000" in point.name else 1.0))
        for point in points(simple, 0.02)
    ]
    found = fit(measured)
    assert min(found.speeds().values()) >= 0
    assert found.model.attention_seconds == 0
    assert found.error < 0.1


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(Unavailable, match="too few"):
        fit(points(REAL)[:5])
