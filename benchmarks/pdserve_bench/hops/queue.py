"""The prefill queue alone: a request from a decode worker through NATS JetStream to a prefill worker, its answer back,
and its ack. On a nats-server like the graph's own; against a plain NATS request and reply of the same bytes on it,
which stores nothing and delivers at most once."""

import asyncio
import itertools
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import cache

from nats.aio.client import Client
from nats.aio.msg import Msg

from pdserve import queue as prefill_queue
from pdserve.errors import Unavailable
from pdserve.messages import KvHandle, PrefillDone, PrefillRequest, PrefillStarted, encode
from pdserve.queue.base import PrefillQueue
from pdserve.queue.jetstream.client import short_connection
from pdserve.supervisor.embedded import EmbeddedNats
from pdserve.tasks import Lifetime, Owner
from pdserve_bench.hops.section import HopOptions, Pair, alternate, cases, compared, table
from pdserve_bench.progress import Schedule
from pdserve_bench.report import Chart, Column, Report, Rows
from pdserve_bench.samples import percentile
from pdserve_bench.systems.cpu import cpu_seconds

NAMES = OURS, BASELINE = "prefill queue", "NATS request"
PROMPTS = (300, 3000)
"""tokens"""
DEPTHS = (1, 8)
"""requests in flight"""
SHARE = 1 / 3
"""of the options' seconds"""
_START = 3.0
_STARTING = "queue: starting nats-server"
_DECODE, _PREFILL, _SUBJECT = "decode-bench", "prefill-bench", "bench.echo"
_BLOCK = 16
_WITHIN = 20.0
_PULL_WAIT = 1.0


def phases(options: HopOptions) -> dict[str, float]:
    each = 2 * SHARE * options.seconds
    return {_STARTING: _START} | {
        _phase(prompt, depth, number): each
        for number in range(options.rounds)
        for prompt in PROMPTS
        for depth in DEPTHS
    }


def _phase(prompt: int, depth: int, number: int) -> str:
    return f"queue: {prompt:,} tokens, {depth} in flight, round {number + 1}"


@dataclass(frozen=True)
class QueueTurn:
    system: str
    prompt: int
    """tokens"""
    depth: int
    requests: int
    seconds: float
    p50: float
    """seconds from publishing to the answer"""
    p99: float
    stored_p50: float
    """seconds until the server says that it has stored the request; 0 where it stores nothing"""
    server_cpu: float
    """seconds of nats-server"""
    clients_cpu: float
    """seconds of this process, which is both workers"""

    @property
    def case(self) -> tuple[int, int]:
        return self.prompt, self.depth


async def measure(options: HopOptions, schedule: Schedule) -> AsyncIterator[Report]:
    turns: list[QueueTurn] = []
    seconds = SHARE * options.seconds
    async with AsyncExitStack() as stack:
        with schedule.phase(_STARTING):
            server = await stack.enter_async_context(EmbeddedNats(options.folder))
            assert server.child is not None
            pid = server.child.pid
            ways = {
                OURS: await stack.enter_async_context(QueueWay(server.url)),
                BASELINE: await stack.enter_async_context(PlainWay(server.url)),
            }
            for way in ways.values():  # connections, subscriptions and code warm up
                await _turn(way, "", pid, PROMPTS[0], 1, 0.3)
        for number in range(options.rounds):
            for prompt, depth in itertools.product(PROMPTS, DEPTHS):
                with schedule.phase(_phase(prompt, depth, number)):
                    for name in alternate(OURS, BASELINE, number):
                        turns.append(await _turn(ways[name], name, pid, prompt, depth, seconds))
                yield _section(turns)


async def _turn(
    way: "RequestWay", name: str, server: int, prompt: int, depth: int, seconds: float
) -> QueueTurn:
    times: list[float] = []
    stored: list[float] = []
    begin, server_before, before = time.monotonic(), cpu_seconds(server), time.process_time()

    async def client() -> None:
        while time.monotonic() < begin + seconds:
            asked = time.monotonic()
            stored.append(await way.ask(prompt))
            times.append(time.monotonic() - asked)

    try:
        async with asyncio.timeout(seconds + _WITHIN), asyncio.TaskGroup() as group:
            for _ in range(depth):
                group.create_task(client())
    except TimeoutError:
        raise Unavailable(f"{name}: a request was not answered within {_WITHIN:g} s") from None
    return QueueTurn(
        name,
        prompt,
        depth,
        len(times),
        time.monotonic() - begin,
        percentile(times, 0.5),
        percentile(times, 0.99),
        percentile(stored, 0.5),
        cpu_seconds(server) - server_before,
        time.process_time() - before,
    )


# ── the two ways of a request ──────────────────────────────────────────────────────────────────────────────


@cache
def _tokens(prompt: int) -> list[int]:
    return [index % 1000 for index in range(prompt)]


def _request(request_id: str, prompt: int) -> PrefillRequest:
    return PrefillRequest(request_id, _DECODE, _tokens(prompt), 60.0, _BLOCK, [bytes(200)])


def _answer(request: PrefillRequest) -> PrefillDone:
    blocks = list(range(len(request.prompt) // _BLOCK))
    handle = KvHandle(
        _PREFILL, request.request_id, "127.0.0.1", 5600, [blocks], len(request.prompt), request.block_size
    )
    return PrefillDone(request.request_id, handle, 0.05)


class RequestWay(Lifetime):
    """A way from a decode worker to a prefill worker that computes nothing, and back."""

    @abstractmethod
    async def ask(self, prompt: int) -> float:
        """Returns when the answer is there: the seconds until the request was stored."""


class QueueWay(RequestWay):
    """The prefill queue, with a connection for each worker, used as the workers do: one request is pulled at a time,
    and its decode worker is told when it starts and when it is done, before the ack."""

    def __init__(self, nats: str) -> None:
        self._decode, self._prefill = (prefill_queue.connect(nats, "bench", "demo") for _ in range(2))
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._numbers = itertools.count()

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        async with self._decode, self._prefill, Owner() as tasks:
            tasks.forever(self._read_answers, "answers")
            tasks.forever(lambda: _prefill(self._prefill), "prefill worker")
            yield

    async def ask(self, prompt: int) -> float:
        request = _request(f"bench-{next(self._numbers)}", prompt)
        done = self._waiting[request.request_id] = asyncio.get_running_loop().create_future()
        begin = time.monotonic()
        await self._decode.publish(request)
        stored = time.monotonic() - begin
        await done
        return stored

    async def _read_answers(self) -> None:
        async for answer in self._decode.answers(_DECODE):
            if isinstance(answer, PrefillDone):
                self._waiting.pop(answer.request_id).set_result(None)


async def _prefill(queue: PrefillQueue) -> None:
    while True:
        for delivery in await queue.pull(1, _PULL_WAIT):
            request = delivery.request
            await queue.answer(request.decode, PrefillStarted(request.request_id, _PREFILL))
            await queue.answer(request.decode, _answer(request))
            await delivery.ack()


class PlainWay(RequestWay):
    """A request of core NATS, of the bytes of a prefill request, and a reply of those of its answer."""

    def __init__(self, nats: str) -> None:
        self._nats = nats
        self._client: Client
        self._replies: dict[int, bytes] = {}
        self._requests: dict[int, bytes] = {}

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        async with short_connection(self._nats) as self._client, short_connection(self._nats) as other:
            for prompt in PROMPTS:
                request = _request("bench-0000", prompt)
                self._requests[prompt] = encode(request)
                self._replies[len(self._requests[prompt])] = encode(_answer(request))
            await other.subscribe(_SUBJECT, cb=self._reply)
            await other.flush()
            yield

    async def _reply(self, message: Msg) -> None:
        await message.respond(self._replies[len(message.data)])

    async def ask(self, prompt: int) -> float:
        await self._client.request(_SUBJECT, self._requests[prompt], timeout=_WITHIN)
        return 0.0


# ── tables ─────────────────────────────────────────────────────────────────────────────────────────────────


def _section(turns: Sequence[QueueTurn]) -> Report:
    prompt, depth = case = cases(turns)[0]
    answered, server = (Pair.of(turns, case, NAMES, figure).cells()[0] for figure in (_answered, _server_cpu))
    chart = Chart(
        "Queue: from publishing to the answer",
        "bars",
        "",
        "median, ms",
        compared(turns, NAMES, _answered, lambda case: f"{case[0]:,} tokens, {case[1]} in flight"),
        better="lower",
    )
    return Report(
        "",
        tables=[_times(turns), _cpu(turns)],
        charts=[chart],
        data={"turns": [asdict(turn) for turn in turns]},
        lead=f"Queue: a request of {prompt:,} tokens is answered {answered:.1f} ms after it was published ({depth} in "
        f"flight) and costs nats-server {server:.0f} us of CPU.",
    )


def _answered(turn: QueueTurn) -> float:
    """Milliseconds."""
    return 1000 * turn.p50


def _server_cpu(turn: QueueTurn) -> float:
    """Microseconds for each request."""
    return 1e6 * turn.server_cpu / turn.requests


def _times(turns: Sequence[QueueTurn]) -> Rows:
    return table(
        "Queue: a prefill request through JetStream, and its answer",
        turns,
        NAMES,
        _CASE,
        (Column("answered p50, ms", ".2f"), _answered),
        {
            Column("p99, ms", ".1f"): lambda turn: 1000 * turn.p99,
            Column("stored p50, ms", ".2f"): lambda turn: 1000 * turn.stored_p50,
            Column("requests/s", ",.0f"): lambda turn: turn.requests / turn.seconds,
        },
        "From publishing a prefill request to its answer, by a prefill worker that computes nothing. It takes one "
        "request at a time, so those in flight wait for each other; a NATS request waits for none.",
    )


def _cpu(turns: Sequence[QueueTurn]) -> Rows:
    title = "Queue: CPU for each request, its ack included"
    workers = {Column("both workers, us", ".0f"): lambda turn: 1e6 * turn.clients_cpu / turn.requests}
    return table(title, turns, NAMES, _CASE, (Column("nats-server, us", ".0f"), _server_cpu), workers)


_CASE: dict[Column, Callable[[tuple[int, int]], int]] = {
    Column("prompt, tokens", ","): lambda case: case[0],
    Column("in flight", ","): lambda case: case[1],
}
