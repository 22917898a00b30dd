"""What the processes of a graph take while nothing is asked: resident memory and CPU; and what watching adds to it.

    python -m pdserve_bench.overhead [-f configs/local.yaml] [--seconds 20] [--json FILE]
    python -m pdserve_bench.overhead --rate 12 --pages 5 --rounds 6     beside a load; with dashboards open, in turn

What the graph adds to a request is measured by `pdserve bench systems --clients 1`, against one plain vLLM engine; with
`--prompt-tokens 20` for prompts that are prefilled locally.
"""

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import httpx
import psutil

from pdserve_bench.client import Exchange
from pdserve_bench.endpoint import Endpoint, Prompts, find_endpoint
from pdserve_bench.launch import started
from pdserve_bench.load import open_loop
from pdserve_bench.options import program
from pdserve_bench.report import Column, Report, Rows
from pdserve_bench.systems.cpu import cpu_seconds, label

_SPIN = 1.5
"""seconds; workers of engines in processes of their own spin for one second after a message"""
_PROMPT, _ANSWER = 300, 64
"""tokens"""
_TIMEOUT = 60.0


async def measure(
    file: Path, folder: Path, *, seconds: float, rate: float, pages: int, rounds: int
) -> Report:
    async with started(file, folder, partial(print, file=sys.stderr)) as running:
        endpoint = await find_endpoint(running.graph.url)
        family: list[psutil.Process] = running.family()
        states = (0, pages) if pages else (0,)
        spent: dict[int, list[list[float]]] = {watching: [] for watching in states}
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(_ask(endpoint, rate))] if rate else []
            await asyncio.sleep(_SPIN)
            for turn in range(rounds):
                for watching in states[:: -1 if turn % 2 else 1]:
                    looking = [group.create_task(_look(endpoint.url)) for _ in range(watching)]
                    spent[watching].append(await _spent(family, seconds))
                    for look in looking:
                        look.cancel()
            for task in background:
                task.cancel()
        rows = [
            [
                label(process),
                process.memory_info().rss / 2**20,
                *(median(turn[at] for turn in spent[watching]) for watching in states),
            ]
            for at, process in enumerate(family)
        ]
    told = f"CPU at {rate:g} requests/s, %" if rate else "idle CPU, %"
    columns = [Column("process"), Column("resident, MiB", ".0f"), Column(told, ".1f")]
    columns += [Column(f"with {pages} pages open, %", ".1f")] if pages else []
    return Report(title=f"{file}: what its processes take", tables=[Rows("Processes", columns, rows)])


async def _spent(family: list[psutil.Process], seconds: float) -> list[float]:
    """Percent of a core, by process."""
    before = [cpu_seconds(process.pid) for process in family]
    await asyncio.sleep(seconds)
    return [
        100 * (cpu_seconds(process.pid) - then) / seconds
        for process, then in zip(family, before, strict=True)
    ]


async def _ask(endpoint: Endpoint, rate: float) -> None:
    """Send requests until cancelled."""
    prompts = Prompts(2.0, 0)

    def requests() -> Iterator[Exchange]:
        while True:
            yield Exchange(endpoint.body(prompts.of(_PROMPT), _ANSWER))

    await open_loop(requests(), partial(endpoint.ask, timeout=_TIMEOUT), rate, float("inf"), 0)


async def _look(url: str) -> None:
    """Poll as an open dashboard does, until cancelled."""
    async with httpx.AsyncClient(trust_env=False) as http:
        while True:
            (await http.get(f"{url}/dashboard/state")).raise_for_status()
            await asyncio.sleep(1)


def main() -> None:
    parser = program(__doc__)
    parser.add_argument("-f", "--file", type=Path, default=Path("configs/local.yaml"), help="the graph")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second, of 300 and 64 tokens")
    parser.add_argument("--pages", type=int, default=0, help="dashboards that are open every other time")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdserve-overhead-") as folder:
        asked = {name: getattr(args, name) for name in ("seconds", "rate", "pages", "rounds")}
        report = asyncio.run(measure(args.file, Path(folder), **asked))
    report.show()
    report.write(args.json, None)


if __name__ == "__main__":
    main()
