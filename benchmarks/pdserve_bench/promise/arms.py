"""The arms of the comparison. An arm is one set of live settings of the running graph. All arms have the same arrivals.
They run forwards, then backwards (ABBA), so that steady drift of the machine favours no arm."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pdserve.contract.live_settings import MAX_THRESHOLD, slo_settings
from pdserve.contract.slo import NO_SLO, SloTargets
from pdserve.registry import keys
from pdserve.registry.base import Registry
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.goodput.measure import JUDGE_LATER, Canary, Probe, probe, warm_up
from pdserve_bench.measure.runs import Scalable
from pdserve_bench.measure.slo import Slo
from pdserve_bench.progress import begin

SETTLED = 0.5
"""Seconds until all processes apply new settings."""
BETWEEN = 3.0
"""Seconds between two windows, as assumed in the first half of the run. The second half uses measured seconds."""


@dataclass(frozen=True)
class Arm:
    name: str
    settings: Mapping[str, str]


OFF = Arm("off", {})
"""No SLO; the file's policy decides between local and remote prefill."""
WAYS = (
    Arm(
        "all remote",
        {
            "policy": "threshold",
            "max-local-prefill-length": "0",
            "max-prefill-queue-size": str(MAX_THRESHOLD),
        },
    ),
    Arm("all local", {"policy": "threshold", "max-local-prefill-length": str(MAX_THRESHOLD)}),
)


def arm_of(name: str, slo: Slo) -> Arm:
    return Arm(name, slo_settings(SloTargets(slo.ttft, slo.gap)))


@dataclass
class Switch:
    _registry: Registry
    _before: Mapping[str, str]

    @classmethod
    @asynccontextmanager
    async def on(cls, registry: Registry) -> AsyncIterator["Switch"]:
        """Yield a switch; restore the earlier settings on exit."""
        found = await registry.read(keys.SETTINGS)
        before = {key.removeprefix(keys.SETTINGS): value.decode() for key, value in found.items()}
        try:
            yield cls(registry, before)
        finally:
            await asyncio.shield(replace_settings(registry, before))

    async def to(self, arm: Arm) -> None:
        await replace_settings(self._registry, {**self._before, **slo_settings(NO_SLO), **arm.settings})
        await asyncio.sleep(SETTLED)


async def replace_settings(registry: Registry, settings: Mapping[str, str]) -> None:
    """Replace all live settings of the graph; the file's values apply to the rest."""
    for key in await registry.read(keys.SETTINGS):
        if key.removeprefix(keys.SETTINGS) not in settings:
            await registry.delete(key)
    for name, value in settings.items():
        await registry.put(keys.setting(name), value.encode(), leased=False)


def in_turn(rates: Sequence[float], arms: Sequence[Arm]) -> Iterator[tuple[float, Arm]]:
    """Yield all arms at each rate, then the same in reverse order."""
    forwards = [(rate, arm) for rate in rates for arm in arms]
    yield from forwards
    yield from reversed(forwards)


@dataclass
class ArmsRun:
    """Results so far. A window is a probe of one arm at one rate."""

    promises: Mapping[str, Slo]
    rates: Sequence[float]
    arms: Sequence[Arm]
    seconds: float
    """Planned duration; longer if the server takes long to become idle."""
    seed: int
    shortest: float = 3.0
    """Minimal seconds of load per window."""
    warm_up: float = 4.0
    windows: list[tuple[Arm, Probe]] = field(default_factory=list)
    """The last one may be running: its `run.ended` is 0."""
    complete: bool = False

    def of(self, arm: Arm, rate: float) -> list[Probe]:
        """Return the windows that have ended."""
        return [made for other, made in self.windows if other == arm and made.rate == rate and made.counted]


async def compare_arms(endpoint: Endpoint, users: Scalable, switch: Switch, result: ArmsRun) -> None:
    """Run the windows. Raises Unavailable if the server fails all requests or does not become idle."""
    deadline = time.monotonic() + result.seconds
    canary, windows = Canary(endpoint), list(in_turn(result.rates, result.arms))
    await switch.to(OFF)
    await canary.learn()
    begin("warming up", result.warm_up)
    await warm_up(endpoint, users, min(result.rates), result.warm_up, result.seed - 1)
    await canary.until_idle()
    between, half, seconds = BETWEEN, len(windows) // 2, 0.0
    for number, (rate, arm) in enumerate(windows):
        began, left = time.monotonic(), len(windows) - number
        if number in (0, half):  # all arms of a half have windows of one length
            seconds, between = max(result.shortest, (deadline - began) / left - between), 0.0
        await switch.to(arm)
        made = Probe(rate, seconds, result.seed + 1000 * (number >= half) + result.rates.index(rate))
        result.windows.append((arm, made))
        begin(f"{arm.name} at {rate:g} req/s", seconds)
        await probe(endpoint, users, made, JUDGE_LATER)
        await canary.until_idle()
        made.counted = True
        between += (time.monotonic() - began - seconds) / half
    result.complete = True
