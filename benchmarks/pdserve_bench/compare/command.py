"""The command `pdserve compare`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.options import File
from pdserve.config.load import load
from pdserve_bench.clients.comparison import ClientsComparison
from pdserve_bench.compare.comparison import Comparison, maker_of
from pdserve_bench.compare.measuring import CompareOptions, UserLoad
from pdserve_bench.compare.outcome import report_of, winning_file
from pdserve_bench.endpoint import Endpoint, learn_prompts
from pdserve_bench.measure.report import Report, check_outputs
from pdserve_bench.measure.runs import PoissonRequests, Scalable, run_and_show
from pdserve_bench.measure.slo import read_slo
from pdserve_bench.measure.trace import read_trace
from pdserve_bench.options import AnswerLen, Gap, Json, PromptTokens, Share, Ttft, counts_of


def compare(
    file: File,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="your users' requests as JSONL, see below")
    ] = None,
    prompt_tokens: PromptTokens = 1300,
    answer_len: AnswerLen = 64,
    rate: Annotated[
        float | None,
        typer.Option(metavar="R", min=0.001, help="requests per second that you need (default: the trace's)"),
    ] = None,
    ttft: Ttft = None,
    gap: Gap = None,
    share: Share = 0.9,
    minutes: Annotated[float, typer.Option(metavar="M", min=0.2, help="total duration")] = 9.0,
    seed: Annotated[int, typer.Option(metavar="N", help="seed of prompts and arrivals")] = 1,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the winner's file, for pdserve serve -f")
    ] = None,
    clients: Annotated[
        str,
        typer.Option(metavar="N,...", help="only compare FILE's graph with vLLM at these numbers of clients"),
    ] = "",
    json: Json = None,
) -> int:
    """Should I disaggregate? Measure your load on aggregated and disaggregated graphs of the same hardware, and
    recommend one of them, with the reason; possibly "don't".

    Candidates run one at a time. Aggregated: one vLLM engine with all of the hardware of FILE's graph, at several
    settings, and as many of FILE's engines as fit. Disaggregated: FILE's split of the hardware and others, on GPUs also
    with different tensor-parallel sizes of prefill and decode workers. Each is measured by its goodput, the highest
    rate at which enough requests (--share) keep --ttft and --gap. The best of each kind is measured longer. The best
    aggregated one is measured twice, which tells the noise.

    The load is --trace, else requests of --prompt-tokens and --answer-len. A trace has lines as {"timestamp": 27482,
    "input_length": 6955, "output_length": 52, "hash_ids": [...]}; only the lengths are needed. Arrivals are Poisson.
    The result is for --rate, else for the trace's mean rate, else for the highest rate.

    With --clients, no goodput is searched: FILE's graph and one plain vLLM engine (on a CPU, one for each thread
    count) stay up. For each number of clients, they get requests in turn. A client asks again once it has a response.

    Nothing else should run on the machine. Ctrl-C shows the result so far. The exit code is 0 whatever the result, 130
    after Ctrl-C.

    examples:
      pdserve compare -f graph.yaml                       nine minutes, on this machine
      pdserve compare -f graph.yaml --rate 2 --ttft 300ms --gap 50ms --json answer.json
      pdserve compare -f graph.yaml --trace users.jsonl --minutes 40 --write best.yaml
      pdserve compare -f graph.yaml --clients 1,8,32 --minutes 6      what does a lone client lose?
    """
    check_outputs(json, write)
    if clients:
        counts = counts_of("--clients", clients)
        loops = ClientsComparison(maker_of(file), counts, prompt_tokens, answer_len, 60 * minutes, seed)
        return run_and_show(loops.run, loops.report, json)
    load, asked = _trace(trace, file) if trace else (_single(prompt_tokens, answer_len, seed), None)
    options = CompareOptions(
        file,
        read_slo(ttft, gap, file),
        share,
        rate if rate is not None else asked,
        minutes,
        seed,
    )
    comparison = Comparison.prepare(options, load)

    def report(complete: bool) -> Report | None:
        if not complete and not any(each.probes for each in comparison.entrants):
            return None
        found = comparison.recommendation()
        winner = comparison.candidate(found)
        if write is not None and winner is not None:
            write.write_text(winning_file(comparison, winner, found))
        return report_of(comparison, complete, write if winner is not None else None)

    return run_and_show(comparison.run, report, json)


def _trace(trace: Path, file: Path) -> tuple[UserLoad, float | None]:
    found = read_trace(trace)
    decode = load(file, {}).decode
    if longest := int(str(decode.engine_args.get("max-model-len", 0))) if decode else 0:
        found = found.within(longest)

    async def make(endpoint: Endpoint) -> Scalable:
        return replace(found, tokens_per_word=(await learn_prompts(endpoint, 0)).tokens_per_word)

    return UserLoad(f"{found.name}: {found.describe()}", make), found.rate


def _single(prompt_tokens: int, answer_len: int, seed: int) -> UserLoad:
    async def make(endpoint: Endpoint) -> Scalable:
        return PoissonRequests(await learn_prompts(endpoint, seed), prompt_tokens, answer_len)

    described = f"{prompt_tokens} tokens in, {answer_len} out"
    return UserLoad(described, make)
