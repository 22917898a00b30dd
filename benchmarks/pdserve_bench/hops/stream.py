"""The TCP stream between a decode worker and a frontend, alone: two processes (`stream_ends`), and messages like the
outputs of one engine step, with TLS. Against a bare TCP connection in the same two processes that carries the same
bytes in the clear."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pdserve.credentials import create
from pdserve_bench.hops.ends import End, end
from pdserve_bench.hops.section import HopOptions, Pair, alternate, cases, compared, table
from pdserve_bench.hops.stream_ends import (
    BURST,
    SIZES,
    Listening,
    StreamFigures,
    StreamTask,
    frame_bytes,
)
from pdserve_bench.progress import Schedule
from pdserve_bench.report import Chart, Column, Report, Rows
from pdserve_bench.systems.cpu import cpu_seconds

NAMES = OURS, BASELINE = "stream", "bare TCP"
SHARE = 1 / 6
"""of the options' seconds: thousands of messages"""
_MODULE = "pdserve_bench.hops.stream_ends"
_START = 2.0
_LATE = 20.0
_STARTING = "stream: starting two processes"


def phases(options: HopOptions) -> dict[str, float]:
    each = 4 * SHARE * options.seconds
    return {_STARTING: _START} | {
        _phase(size, number): each for number in range(options.rounds) for size in SIZES
    }


def _phase(size: int, number: int) -> str:
    return f"stream: outputs of {size} request{'s'[: size > 1]}, round {number + 1}"


@dataclass(frozen=True)
class StreamTurn:
    system: str
    size: int
    burst: int
    """1: a round trip; else so many messages are asked for at a time"""
    messages: int
    seconds: float
    p50: float
    p99: float
    frontend_cpu: float
    """seconds"""
    worker_cpu: float

    @property
    def case(self) -> int:
        return self.size


async def measure(options: HopOptions, schedule: Schedule) -> AsyncIterator[Report]:
    turns: list[StreamTurn] = []
    seconds = SHARE * options.seconds
    async with AsyncExitStack() as stack:
        with schedule.phase(_STARTING):
            both = await stack.enter_async_context(_ends(options.folder))
        for name in (OURS, BASELINE):  # warms both processes up
            await both.turn(name, SIZES[0], BURST, 0.2)
        for number in range(options.rounds):
            for size in SIZES:
                with schedule.phase(_phase(size, number)):
                    for burst in (1, BURST):
                        for name in alternate(OURS, BASELINE, number):
                            turns.append(await both.turn(name, size, burst, seconds))
                yield _section(turns)


# ── the two processes ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Ends:
    worker: End
    frontend: End

    async def turn(self, system: str, size: int, burst: int, seconds: float) -> StreamTurn:
        pids = self.frontend.process.pid, self.worker.process.pid
        before = [cpu_seconds(pid) for pid in pids]
        task = StreamTask(system == BASELINE, size, burst, seconds)
        found = await self.frontend.ask(task, StreamFigures, seconds + _LATE)
        frontend, worker = (cpu_seconds(pid) - earlier for pid, earlier in zip(pids, before, strict=True))
        return StreamTurn(
            system, size, burst, found.messages, found.seconds, found.p50, found.p99, frontend, worker
        )


@asynccontextmanager
async def _ends(folder: Path) -> AsyncIterator[_Ends]:
    """Raises EndLost where they do not come up."""
    credentials = str(create(folder / "credentials").folder)
    async with end(_MODULE, "worker", credentials) as worker:
        listening = await worker.answer(Listening, _LATE)
        address = listening.address, str(listening.bare_port)
        async with end(_MODULE, "frontend", credentials, *address) as frontend:
            yield _Ends(worker, frontend)


# ── tables ─────────────────────────────────────────────────────────────────────────────────────────────────


def _section(turns: Sequence[StreamTurn]) -> Report:
    answered, sent = ([turn for turn in turns if (turn.burst > 1) == one_way] for one_way in (False, True))
    size = cases(turns)[-1]
    trip = Pair.of(answered, size, NAMES, _median_time).cells()
    cpu = Pair.of(sent, size, NAMES, _cpu).cells()
    chart = Chart(
        "Stream: CPU of both sides for each message",
        "bars",
        "requests in the message",
        "microseconds",
        compared(sent, NAMES, _cpu, str),
        better="lower",
    )
    return Report(
        "",
        tables=[_round_trips(answered), _one_way(sent)],
        charts=[chart],
        data={"turns": [asdict(turn) for turn in turns]},
        lead=f"Stream: the outputs of {size} requests come {trip[0]:.0f} us after they were asked for ({trip[3]:.2f} "
        f"times bare TCP) and cost both sides {cpu[0]:.0f} us of CPU.",
    )


def _median_time(turn: StreamTurn) -> float:
    """Microseconds."""
    return 1e6 * turn.p50


def _cpu(turn: StreamTurn) -> float:
    """Microseconds for each message, of both sides."""
    return 1e6 * (turn.frontend_cpu + turn.worker_cpu) / turn.messages


def _round_trips(turns: Sequence[StreamTurn]) -> Rows:
    return table(
        "Stream: round trip between frontend and decode worker",
        turns,
        NAMES,
        {Column("requests", ","): int, Column("bytes", ","): frame_bytes},
        (Column("round trip p50, us", ".0f"), _median_time),
        {Column("p99, us", ".0f"): lambda turn: 1e6 * turn.p99},
        "A small message to the worker, answered by the outputs of a step of so many requests.",
    )


def _one_way(turns: Sequence[StreamTurn]) -> Rows:
    return table(
        "Stream: messages from the decode worker to the frontend",
        turns,
        NAMES,
        {Column("requests", ","): int},
        (Column("CPU of both sides, us", ".1f"), _cpu),
        {
            Column("frontend, us", ".1f"): lambda turn: 1e6 * turn.frontend_cpu / turn.messages,
            Column("messages/s", ",.0f"): lambda turn: turn.messages / turn.seconds,
        },
        f"As fast as they go, {BURST} at a time, each in a turn of the event loop of its own; CPU for each message.",
    )
