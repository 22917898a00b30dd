"""Send hostile requests to a graph beside a canary client with known outputs, and check for leftovers."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
from httptools import HttpParserError, HttpParserUpgrade

from pdserve.config.load import load
from pdserve.contract.records import Role
from pdserve.observe.logs import parse
from pdserve.runtime.tasks import TaskOwner
from pdserve.supervisor.state import GraphRecord
from pdserve_bench.chaos.judge import Judgement
from pdserve_bench.chaos.load import JudgedLoad
from pdserve_bench.chaos.questions import known, learn
from pdserve_bench.client import Exchange, HttpConnection, LoadClient, completion, trusted
from pdserve_bench.fuzz.request import FuzzRequest
from pdserve_bench.fuzz.responses import is_excused, problem, twin_problem
from pdserve_bench.graphs.watch import GraphWatch
from pdserve_bench.measure.load import side_by_side
from pdserve_bench.soak.usage import UsageSnapshot, leaks, measure_usage, parts_of_serve

CONCURRENCY = 32
TIMEOUT = 60.0
SETTLE = 45.0
"""Seconds until leftovers are findings; KV of an abandoned remote prefill is kept until its lease ends."""
BURST_OUTPUT = 200
"""Output tokens: enough that all slots are busy at the same time."""
BURSTS = 5
SOURCE_ADDRESS = "127.0.0.2"
"""Source address of fuzzed requests, because the fair queue must tell their client from the canary."""
KNOWN_CASES = 8
MAX_CANARY_WAIT = 30.0
"""Seconds. A longer wait of the canary for a token is a finding."""
MAX_HOLD = 2.0
"""CPU seconds. A longer block of a frontend's event loop is a finding."""
POLL_INTERVAL = 0.02
"""Seconds between two measurements of how long the event loop is blocked."""
PACE = 0.15
"""CPU seconds of the reference machine for a sum of five million numbers. Times above `MAX_HOLD` are scaled to it."""
TOLD_EVERY = 10.0
GROWTH = {"blocks": 0, "sockets": 8, "files": 8, "tasks": 8, "threads": 24, "MiB": 400}
"""Tolerated growth per process: pools and allocators fill up. The soak test finds slow leaks."""


@dataclass
class FuzzFinding:
    what: str
    request: FuzzRequest | None = None
    status: int = 0


@dataclass
class FuzzReport:
    statuses: Counter[str] = field(default_factory=Counter)
    findings: list[FuzzFinding] = field(default_factory=list)
    canaries: int = 0
    """Judged responses of the canary."""
    longest_pause: float = 0.0
    longest_hold: float = 0.0
    """Longest time a frontend's event loop was blocked, in CPU seconds."""
    seconds: float = 0.0

    @property
    def sent(self) -> int:
        return sum(self.statuses.values())


@dataclass
class Answer:
    status: int = 0
    """0 if the connection closed without a response."""
    kind: str = ""
    body: bytes = b""
    hung: bool = False


async def send(url: str, request: FuzzRequest, source: str = "") -> Answer:
    answer = Answer()
    try:
        async with asyncio.timeout(TIMEOUT if request.leaves is None else request.leaves):
            connection = await HttpConnection.sent(url, request.wire(urlsplit(url).netloc), source)
            try:
                answer.status = await connection.status()
                answer.kind = connection.headers.get("content-type", "")
                answer.body = await connection.rest(despite_reset=True)
            finally:
                connection.abort()
    except TimeoutError:
        answer.hung = True
    except (OSError, EOFError, HttpParserError, HttpParserUpgrade) as error:
        answer.body = repr(error).encode()
    return answer


def slowness() -> float:
    """Return how many times slower than the reference this machine is now, at least 1."""
    began = time.process_time()
    sum(number for number in range(5_000_000))
    return max(1.0, (time.process_time() - began) / PACE)


class Fuzzer:
    """Findings are in `report`."""

    def __init__(
        self,
        graph: GraphRecord,
        logs: Path | None = None,
        say: Callable[[str], None] = print,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`logs`: folder of the graph's logs, if they are checked; `headers` of the canary."""
        self.report = FuzzReport()
        self.graph, self._logs, self.say = graph, logs, say
        self._headers = dict(headers or {})
        self._source = SOURCE_ADDRESS if (urlsplit(graph.url).hostname or "").startswith("127.") else ""
        self._told = time.monotonic()
        self._statuses: dict[str, int] = {}
        """Status by request name; absent if the client disconnected or the request timed out."""

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[JudgedLoad]:
        """Context in which to send requests: the canary runs meanwhile, and the exit checks for leftovers."""
        began = time.monotonic()
        read = {file: file.stat().st_size for file in self._log_files()}
        async with GraphWatch() as watch:
            await watch.move(self.graph)
            before = await watch.learn()
            held = await measure_usage(parts_of_serve(self.graph.pid, before, {}), {})
            load = await self._canary()
            frontends = [
                psutil.Process(instance.pid) for instance in before if instance.role is Role.FRONTEND
            ]
            async with load, TaskOwner() as tasks:
                if len(frontends) == 1:
                    tasks.start(self._measure_holds(frontends[0]), "measuring the frontend's loop")
                yield load
            if self.report.longest_hold > MAX_HOLD:
                self._found(
                    f"the frontend's event loop was blocked for {self.report.longest_hold:.2f} s of CPU time"
                )
            self._judge(load)
            await self._look_after(watch, held, {instance.id for instance in before})
        for file, size in read.items():
            self._read_log(file, size)
        self.report.seconds = time.monotonic() - began

    async def _measure_holds(self, frontend: psutil.Process) -> None:
        """Measure the CPU time (not wall time) that the frontend uses until it responds to a trivial request."""
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT) as http:
            while True:
                began = sum(frontend.cpu_times()[:2])
                with suppress(httpx.HTTPError):
                    await http.get(f"{self.graph.url}/ping")
                used = sum(frontend.cpu_times()[:2]) - began
                if used > MAX_HOLD:
                    used /= slowness()
                self.report.longest_hold = max(self.report.longest_hold, used)
                await asyncio.sleep(POLL_INTERVAL)

    async def run(self, requests: Iterable[FuzzRequest], concurrency: int = CONCURRENCY) -> None:
        await side_by_side(requests, self.send, concurrency)

    async def send(self, request: FuzzRequest) -> None:
        answer = await send(self.graph.url, request, self._source)
        if answer.hung:
            self._count("left")
            if request.leaves is None:
                self._found(f"no end within {TIMEOUT:g} s", request)
            return
        self._count(str(answer.status or "none"))
        if what := problem(request, answer.status, answer.kind, answer.body):
            self._found(what, request, answer.status)
        without = self._statuses.get(request.twin, answer.status)
        if what := twin_problem(answer.status, answer.body, without):
            self._found(what, request, answer.status)
        self._statuses[request.name] = answer.status

    def _count(self, status: str) -> None:
        self.report.statuses[status] += 1
        if time.monotonic() > self._told + TOLD_EVERY:
            self._told = time.monotonic()
            self.say(f"{self.report.sent} requests, {len(self.report.findings)} findings")

    def _found(self, what: str, request: FuzzRequest | None = None, status: int = 0) -> None:
        self.report.findings.append(FuzzFinding(what, request, status))

    # the canary

    async def _canary(self) -> JudgedLoad:
        config, url, model = load(Path(self.graph.config), {}), self.graph.url, self.graph.model
        client = LoadClient(url, self._headers)
        cases = await known(
            config,
            await self.max_model_len(),
            7,
            lambda cases: learn(client, model, islice(cases, KNOWN_CASES), TIMEOUT),
        )
        return JudgedLoad(url, model, cases, 1, TIMEOUT, self._headers)

    async def max_model_len(self) -> int:
        async with self._http() as http:
            listed = (await http.get(f"{self.graph.url}/v1/models")).json()["data"]
        return next(int(entry["max_model_len"]) for entry in listed if entry["id"] == self.graph.model)

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(trust_env=False, timeout=10, verify=trusted(), headers=self._headers)

    def _judge(self, load: JudgedLoad) -> None:
        for seen in load.seen("fuzz", 0.0):
            self.report.canaries += 1
            self.report.longest_pause = max(self.report.longest_pause, seen.pause or 0.0)
            if seen.result is not Judgement.OK:
                self._found(f"canary: {seen.trace}")
        if self.report.longest_pause > MAX_CANARY_WAIT:
            self._found(f"the canary waited {self.report.longest_pause:.1f} s for a token")

    # leftovers

    async def _look_after(self, watch: GraphWatch, before: UsageSnapshot, ids: set[str]) -> None:
        left = await watch.leftovers(SETTLE)
        if left.blocks:
            self._found(f"KV blocks are still held: {dict(left.blocks)}")
        if left.queued:
            self._found(f"{left.queued} prefill requests are still queued")
        for sentence in left.amiss:
            self._found(sentence)
        after = await watch.instances()
        if ids != (there := {instance.id for instance in after}):
            self._found(f"processes ended or started: {sorted(ids ^ there)}")
        async with self._http() as http:
            if (answer := await http.get(f"{self.graph.url}/health")).status_code != 200:
                self._found(f"/health: {answer.status_code} {answer.text}")
            elif there_load := (await http.get(f"{self.graph.url}/load")).json()["server_load"]:
                self._found(f"/load: {there_load}")
        await self._burst(sum(worker.max_num_seqs for worker in after if worker.role.includes(Role.DECODE)))
        parts = parts_of_serve(self.graph.pid, await watch.instances(), {})
        for growth in leaks(before, await measure_usage(parts, {}), GROWTH):
            self._found(growth)

    async def _burst(self, places: int) -> None:
        """Send as many requests as the workers run at once. After a slot leak, every burst has a request that waits for
        another's end; on a busy machine, only some bursts do."""
        client = LoadClient(self.graph.url, self._headers)
        for _ in range(BURSTS):
            burst = [Exchange(completion(self.graph.model, [300 + n], BURST_OUTPUT)) for n in range(places)]
            await asyncio.gather(*(client.ask(exchange, TIMEOUT) for exchange in burst))
            for error in (exchange.error for exchange in burst if exchange.error):
                self._found(f"burst: {error}")
            first_end = min(exchange.ended for exchange in burst)
            late = sum(not exchange.arrivals or exchange.arrivals[0] > first_end for exchange in burst)
            if not late:
                return
        self._found(f"burst: {late} of {places} requests started only when another had ended")

    def _log_files(self) -> list[Path]:
        return sorted(self._logs.glob("*.log")) if self._logs else []

    def _read_log(self, file: Path, size: int) -> None:
        """Find tracebacks after the first `size` bytes, except those that vLLM logs and excused ones."""
        with file.open(errors="replace") as log:
            log.seek(size)
            lines = log.readlines()
        logger, trace = "", ""
        for line in [*lines, ""]:
            record = parse(line.rstrip("\n"), "").logger
            if record or not line:
                if trace and not logger.startswith("vllm.") and not is_excused(trace):
                    self._found(f"{file.name}: {trace}")
                logger, trace = record, ""
            elif trace or line.startswith("Traceback"):
                trace += line
