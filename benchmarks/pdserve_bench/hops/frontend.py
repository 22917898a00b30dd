"""The frontend alone: what a streamed token costs its process, against vLLM's own API server.

Both have engines that cost nothing: the graph a simulated one, vLLM's server none at all (`vllm_app`). They take the
same time for a step and always generate the same token, so that the length of a text is its number of tokens. The graph
runs with all of its processes, so its frontend does all that it does in production: admission, routing, the stream from
the decode worker, metrics. The two take turns under the same load: all streams begin, and only then a window in which
none begins or ends is measured. It is CPU time that counts, which other load on the machine disturbs little.
"""

import asyncio
import math
import os
import resource
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

from pdserve.demo import MODEL_DIR
from pdserve.errors import Unavailable
from pdserve_bench.client import Exchange
from pdserve_bench.endpoint import Prompts
from pdserve_bench.hops.turns import HopOptions, HopTurn, alternate, section
from pdserve_bench.progress import begin, say
from pdserve_bench.report import Column, Report
from pdserve_bench.simulated import simulated
from pdserve_bench.systems.cpu import CpuMeter
from pdserve_bench.systems.system import GraphSystem, PlainVllm, RunningSystem, System

LEVELS = (1, 32, 128, 1000)
NAMES = OURS, BASELINE = "pdserve", "vLLM's app"
COST = "frontend, us"
OTHERS = Column("other processes, us", ".0f")
CLIENT = Column("load generator, % of a core", ".0f")
TOKEN, WORD = 316, " code"
"""in the demo model's tokenizer"""
STEP, SEQUENCE = 0.005, 1 / 3000
"""seconds of a step, and of each request in it: many streams get 3,000 tokens per second together"""
PROMPT = 16
RAMP = 150.0
"""streams that begin in a second: each begins with a request, which costs as much as many tokens"""
SETTLE = 0.5
BEGIN_WITHIN = 60.0
"""seconds after the last request was sent"""
_TIMEOUT = 600.0
_LONG = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
"""long windows need longer streams than the demo model was made for; no model computes them"""
_BLOCK, _ROOM = 32, 64


async def measure(options: HopOptions, levels: Sequence[int] = LEVELS) -> AsyncIterator[Report]:
    turns: list[HopTurn] = []
    possible = [load for load in levels if load <= _most_connections()]
    tokens = max(tokens_needed(load, options.seconds) for load in possible)
    recipes = {OURS: _graph(max(possible), tokens), BASELINE: _vllm_app(tokens)}
    prompts = Prompts(2.0, options.seed)
    async with AsyncExitStack() as stack:
        running: dict[str, RunningSystem] = {}
        begin("frontend: starting the graph and vLLM's app", 30.0)
        for number, (name, recipe) in enumerate(recipes.items()):
            folder = options.folder / str(number)
            folder.mkdir()
            running[name] = await stack.enter_async_context(recipe.start(folder, say))
            await hold_streams(name, running[name], possible[0], SETTLE, prompts)  # warms it up
        for load in possible:
            for number in range(options.rounds):
                phase = f"frontend: {load:,} stream{'s'[: load > 1]}, round {number + 1}"
                begin(phase, 2 * (options.seconds + load / RAMP + 3 * SETTLE))
                for name in alternate(NAMES, number):
                    turns.append(await hold_streams(name, running[name], load, options.seconds, prompts))
                report = _section(turns)
                report.notes += [f"{n:,} streams: ulimit -n is too low." for n in levels if n not in possible]
                yield report


def _section(turns: Sequence[HopTurn]) -> Report:
    note = (
        f"A step of the engines takes {1000 * STEP:g} ms and {1000 * SEQUENCE:.2f} ms for each stream, so that many "
        "streams get 3,000 tokens/s together. Other processes: the graph's workers, servers and supervisor."
    )
    title = "Frontend: CPU of its process for each streamed token"
    report = section(turns, NAMES, title, "streams", COST, [OTHERS, CLIENT], note)
    streams, costs, ratios = (
        ", ".join(format(row[at], spec) for row in report.tables[0].rows)
        for at, spec in ((0, ","), (1, ".0f"), (4, ".2f"))
    )
    report.lead = (
        f"Frontend: a streamed token costs {costs} us of CPU at {streams} streams, {ratios} times what it "
    )
    report.lead += "costs vLLM's own app."
    return report


# ── the two servers ──────────────────────────────────────────────────────────────────────────────────────────────────


def _graph(streams: int, tokens: int) -> System:
    """The graph for so many streams of up to `tokens` tokens at a time."""
    longest = -(-(tokens + _ROOM) // _BLOCK) * _BLOCK
    speed = {"step-seconds": STEP, "sequence-seconds": SEQUENCE, "prefill-rate": 1e9}
    engine = {
        "max-num-seqs": streams,
        "max-num-batched-tokens": max(8192, 2 * _ROOM * streams),
        "num-gpu-blocks-override": 2 * streams * longest // _BLOCK,
        "remote-prefill": False,
    }
    limits = {"max-waiting": 2 * streams, "max-waiting-tokens": 2 * streams * longest}
    common = {"max-model-len": longest}
    same_token = {"first-token": TOKEN, "tokens": 1}
    sections = simulated({**speed, **same_token}, decode=engine, frontend=limits, common=common)
    del sections["PrefillWorker"]
    return GraphSystem(OURS, sections, variables=_LONG)


def _vllm_app(tokens: int) -> System:
    """vLLM's own API server for streams of up to `tokens` tokens."""
    engine = ("--step-seconds", str(STEP), "--sequence-seconds", str(SEQUENCE), "--token", str(TOKEN), "--")
    arguments = ("--host", "127.0.0.1", "--max-model-len", str(tokens + _ROOM))
    program = ("pdserve_bench.hops.vllm_app", *engine)
    return PlainVllm(BASELINE, MODEL_DIR, "demo", arguments, _LONG, program)


def _most_connections() -> int:
    """How many this process, and those that it starts from now on, may have open at a time."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(0, hard - 200)


# ── the load ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def step_seconds(streams: int) -> float:
    return STEP + SEQUENCE * streams


def tokens_needed(streams: int, seconds: float) -> int:
    """So that no stream ends within a window of so many seconds. Of the first streams, which have fast steps while the
    others begin: the integral of 1 / step over the ramp."""
    beginning = math.log(1 + SEQUENCE * streams / STEP) / (SEQUENCE * RAMP)
    return math.ceil(2 * (beginning + (seconds + 4 * SETTLE + 2.0) / step_seconds(streams))) + 50


async def hold_streams(
    system: str, running: RunningSystem, streams: int, seconds: float, prompts: Prompts
) -> HopTurn:
    """Start all streams, measure a window in which all of them run and none begins or ends, and cut them off. Raises
    Unavailable where they do not begin, or end early."""
    endpoint, tokens = running.endpoint, tokens_needed(streams, seconds)
    pids, frontend = running.pids(), {running.frontend} - {0}
    meter, others = CpuMeter(frontend or pids), CpuMeter(pids - frontend if frontend else ())
    exchanges = [Exchange(endpoint.body(prompts.of(PROMPT), tokens)) for _ in range(streams)]
    tasks: list[asyncio.Task[None]] = []
    await _quiet(meter)
    try:
        began = time.monotonic()
        for number, exchange in enumerate(exchanges):
            await asyncio.sleep(max(0.0, began + number / RAMP - time.monotonic()))
            tasks.append(asyncio.create_task(endpoint.ask(exchange, _TIMEOUT)))
        await _begun(system, exchanges)
        await asyncio.sleep(SETTLE)
        await _between_steps(exchanges)
        started, client, characters = time.monotonic(), time.process_time(), _characters(exchanges)
        cpu, beside = meter.read(), others.read()
        await asyncio.sleep(seconds)
        await _between_steps(exchanges)
        cpu, beside = meter.read() - cpu, others.read() - beside
        client = time.process_time() - client
        received = (_characters(exchanges) - characters) // len(WORD)
        if over := [exchange.error or "it ended" for exchange in exchanges if exchange.ended]:
            raise Unavailable(f"{system}: {len(over)} streams ended within the window: {over[0]}")
        busy = 100 * client / (time.monotonic() - started)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    per = 1e6 / max(1, received)
    figures = {COST: per * cpu, OTHERS.name: per * beside, CLIENT.name: busy, "tokens": received}
    return HopTurn(system, streams, figures)


def _characters(exchanges: Sequence[Exchange]) -> int:
    """So far."""
    return sum(len(exchange.text) for exchange in exchanges)


async def _quiet(meter: CpuMeter) -> None:
    """Wait until the server is done with the streams that were cut off before."""
    for _ in range(50):
        before = meter.read()
        await asyncio.sleep(0.1)
        if meter.read() - before < 0.02:
            return


async def _begun(system: str, exchanges: Sequence[Exchange]) -> None:
    deadline = time.monotonic() + BEGIN_WITHIN
    while waiting := sum(not exchange.arrivals for exchange in exchanges):
        if failed := [exchange.error for exchange in exchanges if exchange.error]:
            raise Unavailable(
                f"{system}: {len(failed)} of {len(exchanges)} streams do not begin: {failed[0]}"
            )
        if time.monotonic() > deadline:
            load, cores = os.getloadavg()[0], os.cpu_count()
            why = f"{system}: {waiting} of {len(exchanges)} streams have not begun within {BEGIN_WITHIN:g} s"
            raise Unavailable(f"{why}; the machine's load is {load:.0f} on {cores} cores")
        await asyncio.sleep(0.02)


async def _between_steps(exchanges: Sequence[Exchange]) -> None:
    """Wait for the end of a step, three steps at most: so that a window holds whole steps, with both their tokens and
    the CPU time that they took."""
    step = step_seconds(len(exchanges))
    deadline, changed, seen = time.monotonic() + 3 * step, 0.0, _characters(exchanges)
    while time.monotonic() < deadline:
        await asyncio.sleep(step / 20)
        if (now := _characters(exchanges)) != seen:
            seen, changed = now, time.monotonic()
        elif changed and time.monotonic() - changed > step / 5:
            return
