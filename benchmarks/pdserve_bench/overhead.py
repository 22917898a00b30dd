"""What the graph costs over one bare engine, at concurrency 1: TTFT, resident memory, idle CPU.

    python -m pdserve_bench.overhead [--rounds 15] [--prompt-words 300] [--json FILE]

Both servers run side by side on this machine: a plain vLLM API server (the baseline) and `pdserve serve` with one
decode and one prefill worker, same model, same engine arguments. Requests alternate between them, never two at a time,
with a pause longer than vLLM's one-second spin after each message, so that neither pays for the other. Ratios are
taken pair by pair and the median is reported.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import psutil

from pdserve.demo import MODEL_DIR
from pdserve_bench.client import Exchange, LoadClient
from pdserve_bench.launch import RunningGraph, plain_vllm, started
from pdserve_bench.samples import median_ratio
from pdserve_bench.simulated import simulated, write

_REAL = {"engine": "vllm"}
_ENGINE = ["--block-size", "32", "--max-model-len", "4096", "--enforce-eager", "--served-model-name", "demo"]
_SPIN = 1.2  # seconds; vLLM's workers spin for one second after a message


async def measure(folder: Path, rounds: int, words: int) -> dict[str, object]:
    say = partial(print, file=sys.stderr)
    file = write(simulated(decode=_REAL, prefill=_REAL), folder / "real.yaml")
    async with (
        plain_vllm(MODEL_DIR, _ENGINE, folder, say) as (bare, _),
        started(file, folder, say) as running,
    ):
        return {
            "ttft": await _compare(bare, running.graph.url, rounds, words),
            "processes": await _processes(running, seconds=20.0),
        }


async def _compare(bare: str, graph: str, rounds: int, words: int) -> dict[str, object]:
    """TTFT in seconds: medians of the bare engine, of local and of remote prefill, and the median ratios."""
    short, long = "word " * 20, "word " * words
    samples: dict[str, list[float]] = {"bare short": [], "local": [], "bare long": [], "remote": []}
    for number in range(rounds + 2):  # the first two warm up
        for name, url, text in (
            ("bare short", bare, short),
            ("local", graph, short),
            ("bare long", bare, long),
            ("remote", graph, long),
        ):
            ttft, prefill = await _ttft(url, f"{number} {text}")
            if prefill and prefill != name:
                raise SystemExit(f"a prompt meant for {name} prefill went {prefill}")
            if number >= 2:
                samples[name].append(ttft)
            await asyncio.sleep(_SPIN)
    ratio = {
        "local / bare": median_ratio(samples["local"], samples["bare short"]),
        "remote / bare": median_ratio(samples["remote"], samples["bare long"]),
    }
    return {"seconds": {name: statistics.median(times) for name, times in samples.items()}, "ratio": ratio}


async def _ttft(url: str, prompt: str) -> tuple[float, str]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    exchange = Exchange({**body, "stream": True, "return_token_ids": True})
    await LoadClient(url).ask(exchange, 60)
    if exchange.error or exchange.ttft is None:
        raise SystemExit(f"{url} answered without a token: {exchange.error}")
    return exchange.ttft, exchange.prefill


async def _processes(running: RunningGraph, seconds: float) -> list[dict[str, object]]:
    """Resident memory and CPU share over `seconds` of idleness of every process of the graph."""
    family = running.family()
    await asyncio.sleep(_SPIN)
    before = {process.pid: sum(process.cpu_times()[:2]) for process in family}
    await asyncio.sleep(seconds)
    rows: list[dict[str, object]] = []
    for process in family:
        spent = sum(process.cpu_times()[:2]) - before[process.pid]
        rss = process.memory_info().rss
        rows.append({"process": _label(process), "rss_mb": rss / 2**20, "cpu_percent": 100 * spent / seconds})
    return rows


def _label(process: psutil.Process) -> str:
    command = process.cmdline()
    words = command[command.index("pdserve") + 1 :] if "pdserve" in command else command
    return " ".join(Path(word).name if "/" in word else word for word in words)[:60] or process.name()


def _print(report: Mapping[str, object]) -> None:
    ttft, processes = report["ttft"], report["processes"]
    assert isinstance(ttft, dict)
    assert isinstance(processes, list)
    print(f"\n{'TTFT, concurrency 1':<28}{'median ms':>10}")
    for name, value in ttft["seconds"].items():
        print(f"  {name:<26}{1000 * value:>10.1f}")
    for name, value in ttft["ratio"].items():
        print(f"  {name:<26}{value:>10.2f}x")
    print(f"\n{'process':<62}{'RSS MiB':>9}{'idle CPU %':>12}")
    for row in processes:
        print(f"{row['process']:<62}{row['rss_mb']:>9.0f}{row['cpu_percent']:>12.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompt-words", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdserve-overhead-") as folder:
        report = asyncio.run(measure(Path(folder), args.rounds, args.prompt_words))
    _print(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
