"""What is left of the goodput under too much load, and what of a polite client beside a flood.

    python -m pdserve_bench.overload [--real configs/local.yaml] [--seconds 20] [--json FILE]

Capacity is found by a closed loop; then requests arrive at 1, 2, 5 and 10 times that rate (Poisson, nobody waits for
anybody), each with a deadline. Goodput: requests completed within their deadline, by second. Each client has an API
key of its own. Without --real the engines are simulated, so that the load generator is not the bottleneck. With it,
generator, frontend and engines share the machine: `client`, `front` and `rest` are the cores that each took, and
`good/core` is the goodput by core-second of the rest, the engines. `stall` is the longest time that the generator
itself did not get to run: with more than half a second, somebody else had the machine, and the row says nothing
about the graph.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil

from pdserve.supervisor.state import GraphRecord
from pdserve_bench.chaos.launch import started
from pdserve_bench.chaos.score import percentile

_SIM = """
Common: {model: demo, block-size: 32, max-model-len: 4096}
Frontend: {served_model_name: demo}
VllmWorker:
  engine: sim
  remote-prefill: true
  max-local-prefill-length: 64
  max-num-seqs: 8
  additional-config: {sim: {step-seconds: 0.05, prefill-rate: 4000}}
  common-configs: [model, block-size, max-model-len]
PrefillWorker:
  engine: sim
  additional-config: {sim: {step-seconds: 0.05, prefill-rate: 4000}}
  common-configs: [model, block-size, max-model-len]
"""
CROWD = [f"crowd-{number}" for number in range(8)]
FLOOD, POLITE = "flood", "polite"
FACTORS = (1, 2, 5, 10)
RAMP = 0.25
"""share of each run before its figures count"""
_BEAT = 0.1


@dataclass(frozen=True)
class Answer:
    status: int
    begun: float
    ended: float
    ttft: float = 0.0
    whole: bool = False
    """all of it, within the deadline"""


@dataclass(frozen=True)
class Cpu:
    """Seconds of it, so far or in a run."""

    client: float = 0.0
    front: float = 0.0
    rest: float = 0.0

    @classmethod
    def now(cls, supervisor: int) -> "Cpu":
        graph = psutil.Process(supervisor)
        front = rest = 0.0
        for process in (graph, *graph.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                taken, is_front = sum(process.cpu_times()[:2]), "frontend" in process.cmdline()
                front, rest = front + is_front * taken, rest + (not is_front) * taken
        return cls(sum(os.times()[:2]), front, rest)

    def since(self, before: "Cpu") -> "Cpu":
        return Cpu(self.client - before.client, self.front - before.front, self.rest - before.rest)


@dataclass(frozen=True)
class Shape:
    """What every request is."""

    words: int
    tokens: int
    deadline: float


class Caller:
    def __init__(self, http: httpx.AsyncClient, graph: GraphRecord, shape: Shape) -> None:
        self._http, self._url, self._model = http, f"{graph.url}/v1/completions", graph.model
        self._supervisor = graph.pid
        self.shape = shape
        self._random = random.Random(4711)

    async def ask(self, key: str) -> Answer:
        words = [str(self._random.randrange(1000, 9999)) for _ in range(self.shape.words)]
        body = {
            "model": self._model,
            "prompt": " ".join(words),
            "max_tokens": self.shape.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"authorization": f"Bearer {key}", "x-request-timeout": f"{self.shape.deadline}"}
        begun, status, ttft, said = time.monotonic(), 0, 0.0, ""
        with suppress(httpx.TransportError):
            async with self._http.stream("POST", self._url, json=body, headers=headers) as response:
                status = response.status_code
                async for line in response.aiter_lines():
                    ttft = ttft or time.monotonic() - begun
                    said = line or said
        ended = time.monotonic()
        whole = status == 200 and said == "data: [DONE]" and ended - begun <= self.shape.deadline
        return Answer(status, begun, ended, ttft, whole)

    async def watched(self, work: Coroutine[None, None, "Run"]) -> "Run":
        """With the CPU time that everybody took, and the generator's own longest stall."""
        longest, begin, before_all = 0.0, time.monotonic(), Cpu.now(self._supervisor)

        async def watch() -> None:
            nonlocal longest
            while True:
                before = time.monotonic()
                await asyncio.sleep(_BEAT)
                longest = max(longest, time.monotonic() - before - _BEAT)

        watcher = asyncio.create_task(watch())
        try:
            run = await work
            taken, seconds = Cpu.now(self._supervisor).since(before_all), time.monotonic() - begin
            return replace(run, stall=longest, cpu=taken, seconds=seconds)
        finally:
            watcher.cancel()

    async def closed(self, clients: int, seconds: float) -> "Run":
        """Everybody asks again when answered; a refused one waits a little."""
        begin, answers = time.monotonic(), list[Answer]()

        async def client(number: int) -> None:
            while time.monotonic() < begin + seconds:
                answers.append(await self.ask(CROWD[number % len(CROWD)]))
                if answers[-1].status != 200:
                    await asyncio.sleep(0.2)

        await asyncio.gather(*(client(number) for number in range(clients)))
        return Run(begin, begin + seconds, answers)

    async def open(self, rate: float, seconds: float, keys: list[str]) -> "Run":
        begin, tasks = time.monotonic(), list[asyncio.Task[Answer]]()
        due = begin
        while (due := due + self._random.expovariate(rate)) < begin + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self.ask(self._random.choice(keys))))
        return Run(begin, begin + seconds, await asyncio.gather(*tasks))

    async def polite(self, count: int, seconds: float) -> list[Answer]:
        """One after another."""
        answers: list[Answer] = []
        end = time.monotonic() + seconds
        while len(answers) < count and time.monotonic() < end:
            answers.append(await self.ask(POLITE))
        return answers


@dataclass(frozen=True)
class Run:
    begin: float
    end: float
    answers: list[Answer]
    stall: float = 0.0
    cpu: Cpu = Cpu()
    seconds: float = 1.0
    """until the last answer"""

    @property
    def goodput(self) -> float:
        """By when they ended, after the ramp."""
        start = self.begin + RAMP * (self.end - self.begin)
        good = [one for one in self.answers if one.whole and start <= one.ended < self.end]
        return len(good) / (self.end - start)

    def row(self) -> dict[str, float]:
        late = [one for one in self.answers if one.status in (200, 503, 504) and not one.whole]
        refused = [one.ended - one.begun for one in self.answers if one.status == 429]
        ttft = [one.ttft for one in self.answers if one.whole]
        return {
            "offered/s": len(self.answers) / (self.end - self.begin),
            "goodput/s": self.goodput,
            "429": len(refused),
            "late": len(late),
            "other": len(self.answers) - sum(one.whole for one in self.answers) - len(refused) - len(late),
            "TTFT p50": _quantile(ttft, 0.5),
            "TTFT p99": _quantile(ttft, 0.99),
            "429 p99": _quantile(refused, 0.99),
            "client": self.cpu.client / self.seconds,
            "front": self.cpu.front / self.seconds,
            "rest": self.cpu.rest / self.seconds,
            "good/core": sum(one.whole for one in self.answers) / self.cpu.rest,
            "stall": self.stall,
        }


def _quantile(values: list[float], share: float) -> float:
    return percentile(values, share) if values else float("nan")


async def measure(caller: Caller, clients: int, seconds: float) -> dict[str, object]:
    await caller.closed(clients, 3)
    runs = {"closed": await caller.watched(caller.closed(clients, seconds))}
    capacity = runs["closed"].goodput
    print(f"capacity {capacity:.2f} requests/s, by a closed loop of {clients}")
    for factor in FACTORS:
        runs[f"{factor}x"] = await caller.watched(caller.open(factor * capacity, seconds, CROWD))
    peak = max(run.goodput for run in runs.values())
    rows = {name: {**run.row(), "of peak": run.goodput / peak} for name, run in runs.items()}
    _print(rows)
    return {"capacity": capacity, "load": rows, "polite": await _fairness(caller, capacity, seconds)}


async def _fairness(caller: Caller, capacity: float, seconds: float) -> dict[str, float]:
    alone = await caller.polite(20, seconds)
    flood = asyncio.create_task(caller.open(10 * capacity, seconds, [FLOOD]))
    await asyncio.sleep(RAMP * seconds)
    beside = await caller.polite(1000, (1 - RAMP) * seconds)
    flooded = await flood
    whole = [one.ttft for one in beside if one.whole]
    figures = {
        "TTFT alone p50": statistics.median(one.ttft for one in alone if one.whole),
        "TTFT beside p50": _quantile(whole, 0.5),
        "TTFT beside p99": _quantile(whole, 0.99),
        "asked": len(beside),
        "answered": len(whole),
        "flood answered": sum(one.whole for one in flooded.answers) / len(flooded.answers),
    }
    figures["TTFT ratio"] = figures["TTFT beside p50"] / figures["TTFT alone p50"]
    print("\na polite client beside a flood of 10x:")
    print("  " + ", ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    return figures


def _print(rows: dict[str, dict[str, float]]) -> None:
    names = list(next(iter(rows.values())))
    print(f"\n{'load':<8}" + "".join(f"{name:>11}" for name in names))
    for load, row in rows.items():
        print(f"{load:<8}" + "".join(f"{row[name]:>11.2f}" for name in names))


@asynccontextmanager
async def _graph(file: Path | None, folder: Path) -> AsyncIterator[GraphRecord]:
    os.environ["PDSERVE_API_KEYS"] = ",".join([*CROWD, FLOOD, POLITE])
    if file is None:
        file = folder / "sim.yaml"
        file.write_text(_SIM)
    async with started(file, folder, 1, "", print) as found:
        yield found.graph


async def _main(args: argparse.Namespace) -> None:
    shape = Shape(args.words, args.tokens, args.deadline)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    with tempfile.TemporaryDirectory(prefix="pdserve-overload-") as folder:
        async with (
            _graph(args.real, Path(folder)) as graph,
            httpx.AsyncClient(limits=limits, timeout=3 * args.deadline) as http,
        ):
            report = await measure(Caller(http, graph, shape), args.clients, args.seconds)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", type=Path, metavar="FILE", help="real engines: this graph's")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--deadline", type=float, default=8.0, help="seconds of each request")
    parser.add_argument("--clients", type=int, default=16, help="of the closed loop")
    parser.add_argument("--words", type=int, default=30, help="in a prompt, of four digits")
    parser.add_argument("--tokens", type=int, default=20, help="generated for each request")
    parser.add_argument("--json", type=Path)
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
