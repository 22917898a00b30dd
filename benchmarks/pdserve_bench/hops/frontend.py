"""The frontend alone: what a streamed token and a request cost its process, against vLLM's own API server.

Both have engines that cost nothing (`servers`). The graph's runs with all of its processes, so its frontend does all
that it does in production: admission, routing, the stream from the decode worker, metrics. The two take turns under
the same load (`frontend_load`); what counts is their CPU time, which other load on the machine disturbs little.
"""

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field

from pdserve.errors import Unavailable
from pdserve_bench.endpoint import Prompts
from pdserve_bench.hops import servers
from pdserve_bench.hops.frontend_load import (
    SETTLE,
    FrontendTurn,
    ask_for_one_token,
    hold_streams,
    ramp_seconds,
    tokens_needed,
)
from pdserve_bench.hops.section import HopOptions, alternate, cases, compared, table
from pdserve_bench.progress import Schedule
from pdserve_bench.report import Chart, Column, Report, Rows
from pdserve_bench.samples import percentile
from pdserve_bench.systems.cpu import CpuMeter
from pdserve_bench.systems.system import RunningSystem

LEVELS = (1, 32, 128, 1000)
"""streams"""
CLIENTS = (1, 32)
NAMES = OURS, BASELINE = "pdserve", "vLLM's app"
_START = 30.0
_SERVERS, _PARENTS = ("nats-server", "etcd"), ("supervisor", "guardian")
_FULL = 0.8
"""share of a core from which on the load generator may have slowed what it measures"""


def phases(
    options: HopOptions, levels: Sequence[int] = LEVELS, clients: Sequence[int] = CLIENTS
) -> dict[str, float]:
    found = {_STARTING: _START, _IDLE: options.seconds}
    for number in range(options.rounds):
        for load in levels:
            found[_streaming(load, number)] = 2 * (options.seconds + ramp_seconds(load) + 3 * SETTLE)
        for load in clients:
            found[_asking(load, number)] = 2 * (options.seconds + SETTLE)
    return found


_STARTING = "frontend: starting the graph and vLLM's app"
_IDLE = "frontend: idle"


def _streaming(load: int, number: int) -> str:
    return f"frontend: {load:,} stream{'s'[: load > 1]}, round {number + 1}"


def _asking(load: int, number: int) -> str:
    return f"frontend: requests of one token from {load} client{'s'[: load > 1]}, round {number + 1}"


async def measure(
    options: HopOptions,
    schedule: Schedule,
    levels: Sequence[int] = LEVELS,
    clients: Sequence[int] = CLIENTS,
) -> AsyncIterator[Report]:
    found = _Found()
    possible = [load for load in levels if load <= servers.most_connections()]
    found.notes += [
        f"{load:,} streams: left out, ulimit -n is too low." for load in levels if load not in possible
    ]
    most, tokens = max(*possible, *clients), max(tokens_needed(load, options.seconds) for load in possible)
    recipes = {OURS: servers.graph(most, tokens), BASELINE: servers.vllm_app(BASELINE, tokens)}
    async with AsyncExitStack() as stack:
        running: dict[str, RunningSystem] = {}
        with schedule.phase(_STARTING):
            for name, recipe in recipes.items():
                folder = options.folder / name.partition(" ")[0]
                folder.mkdir()
                running[name] = await stack.enter_async_context(recipe.start(folder, schedule.say))
        meters = {name: system.cpu_meter() for name, system in running.items()}
        prompts = Prompts(2.0, options.seed)
        for name in running:  # the first requests of a process are slower
            await ask_for_one_token(name, running[name].endpoint, meters[name], 4, 1.0, prompts)
        with schedule.phase(_IDLE):
            found.idle = await _idle(meters, options.seconds)
        given_up: set[int] = set()
        for number in range(options.rounds):
            for kind, loads, phase, turns in (
                (hold_streams, possible, _streaming, found.streams),
                (ask_for_one_token, clients, _asking, found.requests),
            ):
                for load in loads:
                    if kind is hold_streams and load in given_up:
                        schedule.cancel(phase(load, number))
                        continue
                    with schedule.phase(phase(load, number)):
                        try:
                            for name in alternate(OURS, BASELINE, number):
                                await _quiet(meters[name])
                                endpoint, meter = running[name].endpoint, meters[name]
                                turns.append(
                                    await kind(name, endpoint, meter, load, options.seconds, prompts)
                                )
                                schedule.update(_told(turns[-1]))
                        except Unavailable as error:  # too much for this machine, as it is just now
                            given_up.add(load)
                            found.notes.append(f"{load:,} streams, round {number + 1}: left out: {error}")
                    yield found.section()


def _told(turn: FrontendTurn) -> str:
    return f"{turn.system}: {turn.tokens / turn.seconds:,.0f} tokens/s"


async def _idle(meters: Mapping[str, CpuMeter], seconds: float) -> dict[str, float]:
    """CPU seconds per second of the processes that hold a frontend."""
    before = {name: meter.read() for name, meter in meters.items()}
    await asyncio.sleep(seconds)
    spent = {name: meter.read().since(before[name]) for name, meter in meters.items()}
    return {name: front(name, reading.seconds) / reading.at for name, reading in spent.items()}


async def _quiet(meter: CpuMeter) -> None:
    """Wait until what was cut off before is done with."""
    for _ in range(50):
        before = meter.read()
        await asyncio.sleep(0.1)
        if meter.read().since(before).total < 0.02:
            return


def front(system: str, cpu: Mapping[str, float]) -> float:
    """Return the CPU seconds of the frontend's process. vLLM's app is one process, which has no name of its own."""
    return cpu.get("frontend", 0.0) if system == OURS else sum(cpu.values())


def _per_token(turn: FrontendTurn) -> float:
    """Microseconds of CPU."""
    return 1e6 * front(turn.system, turn.cpu) / max(1, turn.tokens)


# ── tables ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Found:
    streams: list[FrontendTurn] = field(default_factory=list)
    requests: list[FrontendTurn] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def section(self) -> Report:
        per_token = _comparison(
            "Frontend: CPU of its process for each streamed token",
            "streams",
            self.streams,
            _per_token,
            note=f"A step of the engines takes {1000 * servers.STEP:g} ms and {1000 * servers.SEQUENCE:.2f} ms for "
            "each stream, so that many streams get 3,000 tokens/s together. ± is half of the way from the lowest "
            "to the highest round.",
        )
        tables = [per_token, _processes(self.streams)]
        if self.requests:
            tables.append(
                _comparison(
                    "Frontend: CPU of its process for each request of one token",
                    "clients",
                    self.requests,
                    lambda turn: 1e6 * front(turn.system, turn.cpu) / max(1, turn.requests),
                )
            )
        chart = Chart(
            "Frontend: CPU for each streamed token",
            "lines",
            "concurrent streams",
            "microseconds",
            compared(self.streams, NAMES, _per_token, int),
            log_x=True,
            log_y=True,
            better="lower",
        )
        raw = {"streams": self.streams, "requests": self.requests}
        data = {name: [_raw(turn) for turn in turns] for name, turns in raw.items()}
        return Report(
            "",
            tables=tables,
            charts=[chart],
            data={**data, "idle CPU, seconds per second": self.idle},
            notes=[*self.notes, *self._more_notes()],
            lead=_lead(per_token),
        )

    def _more_notes(self) -> Iterable[str]:
        if self.idle:
            yield (
                f"Idle, the frontend takes {1000 * self.idle[OURS]:.1f} ms of CPU per second, vLLM's app "
                f"{1000 * self.idle[BASELINE]:.1f}. vLLM's app makes its tokens within its own process; the frontend "
                "gets them from the decode worker, over TCP."
            )
        everything = [*self.streams, *self.requests]
        if failed := sum(turn.failed for turn in everything):
            error = next(turn.error for turn in everything if turn.failed)
            yield f"{failed} requests failed, or ended too early: {error}"
        if any(turn.client / turn.seconds > _FULL for turn in everything):
            yield "The load generator had no CPU time left: throughput and times are partly its own."


def _lead(per_token: Rows) -> str:
    streams, costs, ratios = (
        ", ".join(format(row[at], spec) for row in per_token.rows if row[-1] is not None)
        for at, spec in ((0, ","), (1, ".0f"), (-1, ".2f"))
    )
    text = f"Frontend: a streamed token costs {costs} us of CPU at {streams} streams, {ratios} times what it costs "
    return text + "vLLM's own app." if streams else ""


def _comparison(
    title: str,
    load_name: str,
    turns: Sequence[FrontendTurn],
    cost: Callable[[FrontendTurn], float],
    note: str = "",
) -> Rows:
    return table(
        title, turns, NAMES, {Column(load_name, ","): int}, (Column("pdserve, us", ".0f"), cost), note=note
    )


def _processes(turns: Sequence[FrontendTurn]) -> Rows:
    """CPU of each process of the graph."""
    parts: dict[Column, Callable[[FrontendTurn], float]] = {
        Column("frontend, us", ".0f"): lambda turn: front(OURS, turn.cpu),
        Column("decode worker, us", ".0f"): lambda turn: turn.cpu.get("decode", 0.0),
        Column("NATS and etcd, us", ".1f"): lambda turn: sum(turn.cpu.get(name, 0.0) for name in _SERVERS),
        Column("supervisor, us", ".1f"): lambda turn: sum(turn.cpu.get(name, 0.0) for name in _PARENTS),
        Column("load generator, us", ".0f"): lambda turn: turn.client,
    }
    rows = []
    for load in cases(turns):
        if mine := [turn for turn in turns if turn.load == load and turn.system == OURS]:
            costs = [
                statistics.median(1e6 * part(turn) / max(1, turn.tokens) for turn in mine)
                for part in parts.values()
            ]
            rows.append([load, *costs, 100 * statistics.median(turn.client / turn.seconds for turn in mine)])
    columns = [Column("streams", ","), *parts, Column("it has, % of a core", ".0f")]
    return Rows("Graph: CPU of every process for each streamed token", columns, rows)


def _raw(turn: FrontendTurn) -> dict[str, object]:
    """Return the turn for the JSON, without the samples of each request, which are many."""
    kept = {name: value for name, value in asdict(turn).items() if name not in ("ttfts", "gaps")}
    times = {"TTFT": turn.ttfts, "gap": turn.gaps}
    return kept | {
        f"{name} p{100 * share:g}": percentile(values, share)
        for name, values in times.items()
        for share in (0.5, 0.9, 0.99)
    }
