"""The command `pdserve bench replay`."""

import asyncio
import math
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.find import find_graph, view_of
from pdserve.cli.options import GraphFile
from pdserve_bench.endpoint import find_endpoint, key_headers, learn_prompts, server_url
from pdserve_bench.measure.report import check_outputs
from pdserve_bench.measure.runs import run_and_show
from pdserve_bench.measure.slo import read_slo
from pdserve_bench.measure.trace import read_trace
from pdserve_bench.options import ApiKey, BaseUrl, Gap, Json, Model, Seed, Ttft, seed_of
from pdserve_bench.progress import begin, say
from pdserve_bench.replay.result import ReplayResult
from pdserve_bench.replay.sample import sample


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="requests as JSONL, see below")],
    base_url: BaseUrl = None,
    file: GraphFile = None,
    model: Model = "",
    api_key: ApiKey = "",
    speed: Annotated[
        float, typer.Option(metavar="X", min=0.01, help="replay X times as fast as it was recorded")
    ] = 1.0,
    shrink: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=512, help="divide the lengths of prompts and responses by N"),
    ] = 1,
    seconds_: Annotated[
        float | None,
        typer.Option(
            "--seconds", metavar="S", min=1.0, help="send requests for S seconds (default: the whole trace)"
        ),
    ] = None,
    ttft: Ttft = None,
    gap: Gap = None,
    chat: Annotated[
        bool, typer.Option("--chat/--completions", help="ask /v1/chat/completions or /v1/completions")
    ] = False,
    timeout: Annotated[
        float, typer.Option(metavar="S", min=1.0, help="time limit of each request in seconds")
    ] = 120.0,
    seed: Seed = None,
    json: Json = None,
) -> int:
    """Send the requests of a trace at their times, and show over time: TTFT, gaps and prefix hits as clients see them.
    Without --base-url, also show the graph's prefill queue and the KV use of each role.

    A line of TRACE is a request, in the format of the Mooncake traces: {"timestamp": 27482, "input_length": 6955,
    "output_length": 52, "hash_ids": [46, 47]}. The timestamp is in ms. A hash id stands for 512 tokens and all tokens
    before them: prompts of equal ids begin with equal text. Texts are generated; the trace has none.

    For a small model use --shrink: it divides all lengths, those of shared prefixes too. Requests that are longer than
    the model's context are left out and counted. Ctrl-C shows the result so far. Exit code 1 if no request finished,
    130 after Ctrl-C.

    examples:
      pdserve bench replay trace.jsonl                         the running graph of this machine
      pdserve bench replay trace.jsonl --speed 4 --shrink 16 --seconds 300
      pdserve bench replay trace.jsonl --base-url http://gpu7:8000/v1 --ttft 2s --gap 100ms --json out.json
    """
    check_outputs(json)
    slo, chosen = read_slo(ttft, gap, file), seed_of(seed)
    found = read_trace(trace).shrunk(shrink)
    results: list[ReplayResult] = []

    async def work() -> None:
        url = await server_url(base_url, file)
        endpoint = await find_endpoint(url, model, key_headers(api_key), chat)
        per_word = (await learn_prompts(endpoint, chosen)).tokens_per_word
        fitting = replace(found.within(endpoint.max_model_len or sys.maxsize), tokens_per_word=per_word)
        described = f"{fitting.name}: {fitting.describe()}. Seed {chosen}."
        arrivals = fitting.replayed(speed, seconds_ or math.inf, chosen)
        results.append(ReplayResult(endpoint, arrivals, slo, described, timeout))
        say(results[0].described)
        begin(f"{len(arrivals):,} requests", results[0].seconds)
        async with AsyncExitStack() as stack:
            if base_url is None:
                view = await stack.enter_async_context(view_of(find_graph(file, None, None)))
                sampling = asyncio.create_task(sample(view, results[0].samples))
                stack.callback(sampling.cancel)
            await results[0].measure()

    return run_and_show(
        work,
        lambda complete: results[0].report(complete) if results else None,
        json,
        lambda: not results[0].finished,
    )
