"""How fast a real engine is, as the speeds of a simulated one that takes as long.

`learn_speed` asks the server short questions of three kinds and fits `SimModel.step_time`, the function by which
simulated engines take their time, to what it sees:
- prompts alone: the TTFT of a prompt that no cache has seen, of several lengths, in an idle engine;
- answers: the time between tokens at several numbers of sequences and lengths of context;
- both: the longest gap between tokens of running answers while a prompt is computed beside them.

A TTFT holds more than steps: HTTP, tokenizing, queues. That part is fitted as a constant of its own (`overhead`) and is
no speed of the engine: a graph with simulated engines has a real frontend and spends it anyway. What a longer prompt
costs there (tokenizing, about a microsecond per token) is counted as prefill. Gaps between tokens hold none of it.

In a graph that has prefill workers, prompts all remote and all local in turn tell what transfers cost.

Each point of the fit is a median, coefficients are never negative, and points that fit badly are given less weight. The
fit is to relative errors: a millisecond is much in a step and nothing in a long prompt."""

import asyncio
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from pdserve.engine.sim.model import SimModel
from pdserve.errors import Unavailable
from pdserve.records import Role
from pdserve_bench.client import Exchange
from pdserve_bench.endpoint import Endpoint, Prompts, learn_prompts
from pdserve_bench.progress import Schedule
from pdserve_bench.systems.system import ALL_LOCAL, ALL_REMOTE, RunningSystem

TIMEOUT = 60.0
"""seconds, of each request"""
SECONDS = 40.0
SEQUENCES = (1, 2, 4, 8, 16, 32)
LONG_SEQUENCES = (1, 4, 8)
PROMPTS = (32, 128, 384, 768, 1536, 3072, 6144)
MIXED_PROMPTS = (128, 512, 1024)
MIXED_SEQUENCES = 4
REMOTE_PROMPTS = (128, 1536)
REMOTE_PHASE = "calibrate: remote prefill"
_SEED = 1_000_003
"""added to the user's, whose prompts the server may have in its prefix cache"""
_SHORT = 32
_SHARES = {"prompts": 0.35, "answers": 0.45, "both": 0.2}
"""of the time"""
_FREE_BANDWIDTH = 1e15
"""bytes per second where a transfer costs nothing for its size"""
_GRAPH_SECONDS = 0.004
"""of a remote prefill that simulated engines cost too: NATS and two processes on the way, on two cores"""
_FREE = 1e9
"""prompt tokens per second of an engine whose prompts cost nothing that could be seen"""
_HUBER = 1.5
_REFITS = 20


@dataclass(frozen=True)
class EngineLimits:
    """Limits of the measured engine, within which all questions stay."""

    max_model_len: int = 4096
    max_num_seqs: int = 32
    max_batched_tokens: int = 2048


@dataclass(frozen=True)
class EngineStep:
    """What is in a step; arguments of `SimModel.step_time`."""

    decoding: int = 0
    context: int = 0
    chunks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class SpeedPoint:
    """Something that was measured, and the steps that it is made of."""

    name: str
    steps: tuple[EngineStep, ...]
    seconds: float
    """the median"""
    whole: bool = False
    """a TTFT, which holds the overhead, too"""

    def predicted(self, model: SimModel, overhead: float) -> float:
        steps = sum(model.step_time(step.decoding, step.context, step.chunks) for step in self.steps)
        return steps + (overhead if self.whole else 0.0)


@dataclass(frozen=True)
class EngineSpeed:
    """Speeds of a simulated engine, in the units of `SimModel`, and how well they fit."""

    model: SimModel
    overhead: float
    """seconds of a TTFT that are not the engine's"""
    points: tuple[SpeedPoint, ...]
    sizes: tuple[tuple[str, int], ...] = ()
    """keys of `sim` that say how large the engine is, where that is known"""

    def speeds(self) -> dict[str, float]:
        """The keys of `sim` in an engine's `additional-config`, which takes no float for a whole number."""
        model = self.model
        found = {
            "step-seconds": model.step_seconds,
            "sequence-seconds": model.sequence_seconds,
            "context-seconds": model.context_seconds,
            "prefill-rate": model.prefill_rate,
            "attention-seconds": model.attention_seconds,
            "transfer-seconds": model.transfer_seconds,
            "bandwidth": model.bandwidth,
            "bytes-per-token": model.bytes_per_token,
        }
        rounded = {name: float(f"{value:.4g}") for name, value in found.items() if isinstance(value, float)}
        return {**found, **rounded, **dict(self.sizes)}

    def errors(self) -> dict[str, float]:
        """Point -> predicted by measured, less 1."""
        return {
            point.name: point.predicted(self.model, self.overhead) / point.seconds - 1
            for point in self.points
        }

    @property
    def error(self) -> float:
        """The median of the relative errors, without their signs."""
        return statistics.median(map(abs, self.errors().values()))

    @property
    def worst(self) -> tuple[str, float]:
        """The point that fits worst, and its relative error."""
        return max(self.errors().items(), key=lambda item: abs(item[1]))

    def describe(self) -> str:
        model, (name, worst) = self.model, self.worst
        return (
            f"a step takes {1e3 * model.step_seconds:.3g} ms, {1e6 * model.sequence_seconds:.0f} us more per sequence "
            f"and {1e6 * model.context_seconds:.0f} us per 1,000 tokens of context; a prompt of 1,000 tokens "
            f"{1e3 * model.step_time(0, 0, [(0, 1000)]):.0f} ms; fit error {100 * self.error:.0f} % (median of "
            f"{len(self.points)}), at worst {100 * worst:+.0f} %: {name}"
        )


async def learn_speed(
    system: RunningSystem,
    schedule: Schedule,
    limits: EngineLimits,
    *,
    remote: bool,
    seconds: float = SECONDS,
    seed: int = 0,
) -> EngineSpeed:
    """Measure an idle system whose engines are all alike. Takes about so many seconds, more where they are slow. With
    `remote` (it has prefill workers) also what its transfers cost, for a quarter of the time; and of a graph how large
    its decode workers' engines are, within whose limits it asks. Leaves the live settings as they are in its file.
    Raises Unavailable where the server fails, or prompts do not go where the settings say."""
    sizes: tuple[tuple[str, int], ...] = ()
    for worker in (await system.instances(Role.DECODE))[:1]:
        sizes = (("block-size", worker.block_size), ("kv-blocks", worker.kv_blocks))
        limits = replace(
            limits,
            max_model_len=min(limits.max_model_len, worker.max_model_len),
            max_num_seqs=min(limits.max_num_seqs, worker.max_num_seqs or limits.max_num_seqs),
        )
    questions = _Questions(system.endpoint, await learn_prompts(system.endpoint, _SEED + seed), limits)
    measures = {"prompts": questions.alone, "answers": questions.answers, "both": questions.both}
    local = (0.75 if remote else 1.0) * seconds
    for name in measures:
        schedule.announce(f"calibrate: {name}", _SHARES[name] * local)
    if remote:
        schedule.announce(REMOTE_PHASE, seconds - local)
        await system.apply(ALL_LOCAL)
    points: list[SpeedPoint] = []
    for name, measure in measures.items():
        with schedule.phase(f"calibrate: {name}"):
            points += await measure(_SHARES[name] * local)
    found = replace(fit(points), sizes=sizes)
    if remote:
        with schedule.phase(REMOTE_PHASE, seconds - local):
            model = await _with_transfers(system, found.model, questions, seconds - local)
            await system.apply({})
        found = replace(found, model=model)
    return found


async def _with_transfers(
    system: RunningSystem, model: SimModel, questions: "_Questions", seconds: float
) -> SimModel:
    """What a remote prefill costs more than a local one, without the step in which the decode engine computes the last
    token of the prompt, and without what simulated engines cost as well."""
    ways, lengths = {"local": ALL_LOCAL, "remote": ALL_REMOTE}, questions.fitting(REMOTE_PROMPTS)
    if not lengths:
        raise Unavailable("calibrate: the engine's steps are too small for a prompt")
    seen: dict[tuple[int, str], list[tuple[int, float]]] = defaultdict(list)
    for number in _rounds(seconds, most=12, least=4):
        for way, settings in ways.items():
            await system.apply(settings)
            for length in lengths:
                sample = await questions.prefilled(length, way)
                if number:  # the first round warms up
                    seen[length, way].append(sample)
    rows, costs = [], []
    for length in lengths:
        (_, local), (tokens, remote) = (_medians(seen[length, way]) for way in ways)
        rows.append([1.0, tokens])
        costs.append(max(1e-6, remote - local))
    fixed, token = map(float, _least_squares(np.array(rows), np.array(costs)))
    return replace(
        model,
        transfer_seconds=max(0.0, fixed - _GRAPH_SECONDS),
        bandwidth=model.bytes_per_token / token if token > 0 else _FREE_BANDWIDTH,
    )


def _rounds(seconds: float, most: int, least: int = 1) -> Iterator[int]:
    """Yield numbers of rounds, until there is no time for another one that takes as long as the last."""
    end, took = time.monotonic() + seconds, 0.0
    for number in range(most):
        began = time.monotonic()
        if number >= least and began + took > end:
            return
        yield number
        took = time.monotonic() - began


def _medians(samples: Sequence[tuple[float, ...]]) -> list[float]:
    """Return the median of each figure of the samples."""
    return [statistics.median(values) for values in zip(*samples, strict=True)]


class _Questions:
    def __init__(self, endpoint: Endpoint, prompts: Prompts, limits: EngineLimits) -> None:
        self._endpoint, self._prompts, self._limits = endpoint, prompts, limits
        self._step = 0.0
        """seconds of the last step that was measured: how many tokens there is time for"""

    def fitting(self, lengths: Iterable[int], beside: int = 0) -> list[int]:
        """Return the lengths of prompts that fit in one step, beside so many tokens."""
        room = min(self._limits.max_model_len - 16, self._limits.max_batched_tokens - beside)
        return [length for length in lengths if length <= room]

    async def alone(self, seconds: float) -> list[SpeedPoint]:
        """The first round warms up. Lengths that take too much of the time are left out."""
        lengths = [length for length in PROMPTS if length + 16 <= self._limits.max_model_len]
        seen: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for number in _rounds(seconds, most=16, least=2):
            for length in list(lengths):
                answer = await self._ask(self._prompts.of(length), 1)
                ttft = answer.ttft or 0.0
                if number:
                    seen[length].append((ttft, answer.prompt_tokens or length))
                elif ttft > seconds / 12:
                    lengths = [each for each in lengths if each <= length]
        points = []
        for length, samples in seen.items():
            ttft, tokens = _medians(samples)
            points.append(SpeedPoint(f"TTFT of {length} tokens", self._prefill(round(tokens)), ttft, True))
        return points

    async def prefilled(self, length: int, way: str) -> tuple[int, float]:
        """Tokens of a prompt that is prefilled this way, and the seconds to its second token: the first of a remote
        prefill comes before its KV. Live settings take a moment to arrive."""
        for _ in range(20):
            answer = await self._ask(self._prompts.of(length), 2)
            if answer.prefill == way:
                pause = answer.arrivals[-1] - answer.arrivals[0]
                return answer.prompt_tokens or length, (answer.ttft or 0.0) + pause
            await asyncio.sleep(0.1)
        raise Unavailable(f"calibrate: prompts that should be prefilled {way} are not")

    def _prefill(self, tokens: int) -> tuple[EngineStep, ...]:
        size = self._limits.max_batched_tokens
        return tuple(
            EngineStep(chunks=((before, min(size, tokens - before)),)) for before in range(0, tokens, size)
        )

    async def answers(self, seconds: float) -> list[SpeedPoint]:
        """All points once, and again while there is time: what disturbs the machine for a second is in one sample of
        a point."""
        most = self._limits.max_num_seqs
        long = min(2048, self._limits.max_model_len // 2)
        plan = [(count, _SHORT) for count in SEQUENCES if count <= most]
        plan += [(count, long) for count in LONG_SEQUENCES if count <= most]
        prompts = {length: [self._prompts.of(length) for _ in range(2)] for length in (_SHORT, long)}
        seen: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        for _ in _rounds(seconds, most=8):
            for count, length in plan:
                tokens = round(seconds / len(plan) / 6 / self._step) if self._step else 16
                some = await self._together(prompts[length], count, max(12, min(48, tokens)))
                if pace := _pace(some):
                    self._step = pace
                    context = sum(each.prompt_tokens + each.output_tokens // 2 for each in some)
                    seen[count, length].append((pace, context))
        points = []
        for (count, length), samples in seen.items():
            itl, middle = _medians(samples)
            name = f"ITL of {count} sequences of {length} tokens"
            points.append(SpeedPoint(name, (EngineStep(count, round(middle)),), itl))
        return points

    async def _together(self, prompts: list[str], count: int, tokens: int) -> list[Exchange]:
        """The same prompts each time, two of them: computed once, then in the prefix cache, and with no prefix that
        all sequences share, since vLLM may compute the attention of such a one only once."""
        asked = [self._ask(prompts[number % len(prompts)], tokens) for number in range(count)]
        return await asyncio.gather(*asked)

    async def both(self, seconds: float) -> list[SpeedPoint]:
        count = min(MIXED_SEQUENCES, self._limits.max_num_seqs - 1)
        if count < 1:
            return []
        seen: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
        for _ in _rounds(seconds, most=8):
            for length in self.fitting(MIXED_PROMPTS, count):
                if found := await self._beside(count, length):
                    seen[length].append(found)
        points = []
        for length, samples in seen.items():
            gap, prompt, context = _medians(samples)
            step = EngineStep(count, round(context), ((0, round(prompt)),))
            points.append(
                SpeedPoint(f"gap of {count} sequences beside {length} tokens of prompt", (step,), gap)
            )
        return points

    async def _beside(self, count: int, length: int) -> tuple[float, float, float] | None:
        """The gap of running answers in which a prompt is computed, the tokens of that prompt, and the context of the
        answers. None where they were over too early."""
        running = [self._exchange(self._prompts.of(_SHORT), 32) for _ in range(count)]
        async with asyncio.TaskGroup() as group:
            for exchange in running:
                group.create_task(self._endpoint.ask(exchange, TIMEOUT))
            while not all(len(each.arrivals) > 2 or each.ended for each in running):  # noqa: ASYNC110 (no event)
                await asyncio.sleep(0.002)
            beside = await self._ask(self._prompts.of(length), 1)
        _check(running)
        came = beside.started + (beside.ttft or 0.0)
        if any(each.arrivals[-1] < came for each in running):
            return None
        longest = [_gap_at(each, came) for each in running]
        context = sum(each.prompt_tokens + each.output_tokens // 2 for each in running)
        return statistics.median(longest), beside.prompt_tokens or length, context

    def _exchange(self, prompt: str, tokens: int) -> Exchange:
        """Ask for token ids, since not every token has text."""
        return Exchange({**self._endpoint.body(prompt, tokens), "return_token_ids": True})

    async def _ask(self, prompt: str, tokens: int) -> Exchange:
        exchange = self._exchange(prompt, tokens)
        await self._endpoint.ask(exchange, TIMEOUT)
        _check([exchange])
        return exchange


def _check(exchanges: Sequence[Exchange]) -> None:
    """Raises Unavailable."""
    for exchange in exchanges:
        if exchange.error or not exchange.arrivals:
            raise Unavailable(f"calibrate: a request failed: {exchange.error or 'no token came'}")


def _gap_at(exchange: Exchange, moment: float) -> float:
    """The longest of the few gaps that end about then: of all of its gaps, the longest would be one that something
    else has made."""
    gaps = list(pairwise(exchange.arrivals))
    nearest = min(range(len(gaps)), key=lambda number: abs(gaps[number][1] - moment))
    return max(after - before for before, after in gaps[max(0, nearest - 2) : nearest + 3])


def _pace(exchanges: Sequence[Exchange]) -> float:
    """Seconds per token while all of them generate; 0 where they never did together. The median, or the mean where
    tokens come several at a time."""
    begin = max(exchange.arrivals[0] for exchange in exchanges)
    end = min(exchange.arrivals[-1] for exchange in exchanges)
    paces = []
    for exchange in exchanges:
        within = [each for each in exchange.arrivals if begin <= each <= end]
        gaps = [after - before for before, after in pairwise(within)]
        if len(gaps) >= 4:
            mean = statistics.fmean(gaps)
            together = sum(gap < mean / 10 for gap in gaps) > len(gaps) / 10
            paces.append(mean if together else statistics.median(gaps))
    return statistics.median(paces) if paces else 0.0


_NOTHING = SimModel(prefill_rate=math.inf, step_seconds=0.0)
_UNITS = (
    replace(_NOTHING, step_seconds=1.0),
    replace(_NOTHING, sequence_seconds=1.0),
    replace(_NOTHING, context_seconds=1.0),
    replace(_NOTHING, prefill_rate=1.0),
    replace(_NOTHING, attention_seconds=1.0),
)
"""`step_time` is linear in these: with a unit of each, the columns of the fit"""


def fit(points: Sequence[SpeedPoint]) -> EngineSpeed:
    """Raises Unavailable where there are too few points."""
    if len(points) < len(_UNITS) + 1:
        raise Unavailable(f"calibrate: {len(points)} measurements are too few to tell the engine's speed.")
    measured = np.array([point.seconds for point in points])
    rows = np.array(
        [[*(point.predicted(unit, 0.0) for unit in _UNITS), 1.0 if point.whole else 0.0] for point in points]
    )
    rows /= measured[:, None]
    weights = np.ones(len(points))
    for _ in range(_REFITS):
        found = _least_squares(rows * weights[:, None], weights)
        errors = np.abs(rows @ found - 1)
        spread = max(float(np.median(errors)) * 1.4826, 1e-4)
        weights = np.sqrt(np.minimum(1.0, _HUBER * spread / np.maximum(errors, 1e-9)))
    step, sequence, context, token, attention, overhead = map(float, found)
    model = SimModel(
        step_seconds=max(step, 1e-6),
        sequence_seconds=sequence,
        context_seconds=context,
        prefill_rate=min(_FREE, 1 / token) if token else _FREE,
        attention_seconds=attention,
    )
    return EngineSpeed(model, overhead, tuple(points))


def _least_squares(rows: "np.ndarray", wanted: "np.ndarray") -> "np.ndarray":
    """The best coefficients that are not negative: of all subsets of the columns (64) the one that fits best."""
    best, least = np.zeros(rows.shape[1]), math.inf
    for size in range(1, rows.shape[1] + 1):
        for columns in map(list, combinations(range(rows.shape[1]), size)):
            some = np.linalg.lstsq(rows[:, columns], wanted, rcond=None)[0]
            error = float(np.sum((rows[:, columns] @ some - wanted) ** 2))
            if (some >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(rows.shape[1]), error
                best[columns] = some
    return best
