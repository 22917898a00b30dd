"""Replay traces on simulated graphs that differ in where prompts with a known prefix go.

    python -m pdserve_bench.replay.prefixes TRACE... [--requests 600] [--seconds 45] [--json FILE]

Each graph has two decode and four prefill workers, or six decode workers. Whole sessions are drawn from each trace, so
that prefixes stay shared. Lengths are divided by 16. The column `one cache` tells how many prefix hits the same prompts
would have in one LRU cache with as many KV blocks as the four prefill workers together.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pdserve.config.engine_args.installed import resolve_model
from pdserve.contract.prefixes import block_names
from pdserve.observe.tables import show, table
from pdserve_bench.endpoint import find_endpoint, learn_prompts
from pdserve_bench.graphs.launch import started
from pdserve_bench.graphs.simulated import simulated, write
from pdserve_bench.measure.runs import cached_share
from pdserve_bench.measure.slo import Slo
from pdserve_bench.measure.trace import Trace, read_trace
from pdserve_bench.options import exit_code, program
from pdserve_bench.progress import say
from pdserve_bench.replay.result import ReplayResult

SHRINK = 16
BLOCK = 16
CACHE = 1024
"""KV blocks of each worker."""
PREFILL, DECODE = 4, 2
SHARED = 0.01
"""A block in more than this share of the requests is of a system prompt, not of a session."""
LONGEST = 3500
"""Tokens of the longest request after shrinking."""
SLO = Slo(2.0, 0.25)
SPEED = {"prefill-rate": 1900.0, "step-seconds": 0.01, "lease": 12.0}
REMOTE = {"remote-prefill": True, "policy": "adaptive"}


@dataclass(frozen=True)
class ReplayedGraph:
    name: str
    router: str
    decode: Mapping[str, object]
    workers: tuple[int, int] = (DECODE, PREFILL)

    def sections(self) -> dict[str, Any]:
        decoding, prefilling = self.workers
        sections = simulated(
            SPEED,
            decode={"ServiceArgs": {"workers": decoding}},
            prefill={"ServiceArgs": {"workers": prefilling}},
            common={
                "block-size": BLOCK,
                "num-gpu-blocks-override": CACHE,
                "max-model-len": 4096,
                "max-num-batched-tokens": 256,
            },
        )
        sections["Processor"] = {"router": self.router, "enable-prompt-tokens-details": True}
        for key in ("remote-prefill", "max-local-prefill-length"):
            del sections["VllmWorker"][key]
        sections["VllmWorker"] |= self.decode
        if not prefilling:
            del sections["PrefillWorker"]
        return sections


GRAPHS = (
    ReplayedGraph("any worker", "round-robin", {**REMOTE, "prefill-by-prefix": False}),
    ReplayedGraph("any worker, router kv", "kv", {**REMOTE, "prefill-by-prefix": False}),
    ReplayedGraph("where the prefix is", "round-robin", REMOTE),
    ReplayedGraph("where the prefix is, router kv", "kv", REMOTE),
    ReplayedGraph("one engine each, router kv", "kv", {}, (DECODE + PREFILL, 0)),
)


def drawn(trace: Trace, count: int) -> Trace:
    """Return about `count` requests, in whole sessions. Requests of a session share a block that few others have."""
    blocks = Counter(block for each in trace.requests for block in each.blocks)
    most = SHARED * len(trace.requests)

    def chosen(session: int) -> bool:
        return random.Random(session).random() < count / len(trace.requests)

    kept = [
        each
        for number, each in enumerate(trace.requests)
        if chosen(next((block for block in each.blocks if blocks[block] <= most), -number))
    ]
    return replace(trace, requests=tuple(kept))


def one_cache(prompts: Iterable[Sequence[int]], blocks: int) -> float:
    """Return the share of prompt tokens that one LRU cache of this many blocks finds."""
    cache, found, total = OrderedDict[bytes, None](), 0, 0
    for prompt in prompts:
        names = list(block_names(prompt, BLOCK))
        reusable = names[: (len(prompt) - 1) // BLOCK]
        found += BLOCK * sum(1 for _ in takewhile(cache.__contains__, reusable))
        total += len(prompt)
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return found / total


async def measure(
    graph: ReplayedGraph, traces: list[Trace], seconds: float, folder: Path
) -> list[dict[str, Any]]:
    """Replay the traces one after the other on a new graph."""
    file = write(graph.sections(), folder / "graph.json")
    tokenizer = Tokenizer.from_file(str(Path(resolve_model("demo", folder)) / "tokenizer.json"))
    rows = []
    async with started(file, folder, say) as running:
        endpoint = await find_endpoint(running.urls[0], "", {})
        per_word = (await learn_prompts(endpoint, 1)).tokens_per_word
        for trace in traces:
            times = [each.timestamp or 0.0 for each in trace.requests]
            speed = (max(times) - min(times)) / 1000 / seconds
            arrivals = replace(trace, tokens_per_word=per_word).replayed(speed, seconds, 1)
            result = ReplayResult(endpoint, arrivals, SLO, trace.name, 60.0)
            await result.measure()
            figures = result.run.summary(SLO)
            texts = (str(body(endpoint)["prompt"]) for _, body in arrivals)
            prompts = [each.ids for each in tokenizer.encode_batch(list(texts))]
            ways = Counter(each.prefill for each in result.finished)
            rows.append(
                {
                    "trace": trace.name,
                    "graph": graph.name,
                    "requests": len(arrivals),
                    "failed": figures["failed"],
                    "hits": cached_share(result.finished) or 0.0,
                    "one cache": one_cache(prompts, PREFILL * CACHE),
                    "remote": ways["remote"] / max(1, len(result.finished)),
                    "ttft p50": 1000 * figures["TTFT p50"],
                    "ttft p99": 1000 * figures["TTFT p99"],
                    "kept": figures["kept"],
                    "goodput": figures["goodput"],
                }
            )
            say(json.dumps(rows[-1]))
    return rows


async def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    traces = [drawn(read_trace(file).shrunk(SHRINK).within(LONGEST), args.requests) for file in args.traces]
    rows: list[dict[str, Any]] = []
    for graph in GRAPHS:
        if not args.graphs or any(part in graph.name for part in args.graphs):
            with tempfile.TemporaryDirectory(prefix="pdserve-prefixes-") as folder:
                rows += await measure(graph, traces, args.seconds, Path(folder))
    return rows


def main() -> int:
    parser = program(__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--graphs", nargs="*", default=[], help="only graphs with one of these words")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = asyncio.run(compare(args))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))
    shown = table("trace", "graph", *(name for name in rows[-1] if name not in ("trace", "graph")))
    for row in sorted(rows, key=lambda row: str(row["trace"])):
        shown.add_row(*(_cell(row.get(name)) for name in rows[-1]))
    show(shown)
    return 0


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value if value is not None else "")


if __name__ == "__main__":
    sys.exit(exit_code(main))
