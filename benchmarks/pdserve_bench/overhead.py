"""What the processes of a graph take while nothing is asked: resident memory and CPU.

    python -m pdserve_bench.overhead [-f configs/local.yaml] [--seconds 20] [--json FILE]

What the graph adds to a request is measured by `pdserve bench systems --clients 1`, against one plain vLLM engine; with
`--prompt-tokens 20` for prompts that are prefilled locally.
"""

import argparse
import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path

import psutil

from pdserve_bench.launch import started
from pdserve_bench.report import Column, Report, Rows
from pdserve_bench.systems.cpu import cpu_seconds, label

_SPIN = 1.5
"""seconds; workers of engines in processes of their own spin for one second after a message"""


async def measure(file: Path, folder: Path, seconds: float) -> Report:
    async with started(file, folder, partial(print, file=sys.stderr)) as running:
        await asyncio.sleep(_SPIN)
        family: list[psutil.Process] = running.family()
        before = [cpu_seconds(process.pid) for process in family]
        await asyncio.sleep(seconds)
        spent = [cpu_seconds(process.pid) - then for process, then in zip(family, before, strict=True)]
        rows = [
            [label(process), process.memory_info().rss / 2**20, 100 * cpu / seconds]
            for process, cpu in zip(family, spent, strict=True)
        ]
    columns = [Column("process"), Column("resident, MiB", ".0f"), Column("idle CPU, %", ".1f")]
    return Report(title=f"{file}: idle", tables=[Rows("Processes", columns, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-f", "--file", type=Path, default=Path("configs/local.yaml"), help="the graph")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdserve-overhead-") as folder:
        report = asyncio.run(measure(args.file, Path(folder), args.seconds))
    report.show()
    report.write(args.json, None)


if __name__ == "__main__":
    main()
