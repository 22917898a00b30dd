"""`pdserve compare`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.options import File
from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.errors import ConfigError
from pdserve_bench.compare.closed import ClosedLoops, ClosedOptions
from pdserve_bench.compare.closed_report import closed_report
from pdserve_bench.compare.comparison import Comparison, maker_of
from pdserve_bench.compare.measuring import CompareOptions, UserLoad
from pdserve_bench.compare.shown import report_of, winning_file
from pdserve_bench.compare.trace import read_trace
from pdserve_bench.endpoint import Endpoint, learn_prompts
from pdserve_bench.goodput.requests import PoissonRequests
from pdserve_bench.multi_round.workload import MultiRound
from pdserve_bench.options import AnswerLen, Gap, Json, Plot, PromptTokens, Share, Ttft, numbers
from pdserve_bench.progress import Schedule
from pdserve_bench.report import Report, check_outputs
from pdserve_bench.runs import Scalable, run_and_show
from pdserve_bench.slo import read_slo

_SHARED = 0.05
"""of a trace's prompt tokens in shared prefixes: from here on the prefix cache counts"""


def compare(
    file: File,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="your users: requests as JSONL, see below")
    ] = None,
    prompt_tokens: PromptTokens = 1300,
    answer_len: AnswerLen = 64,
    num_users: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="chats as of bench multi-round: users at a time")
    ] = None,
    num_rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="questions of each chat")] = None,
    shared_system_prompt: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="words that all chats begin with")
    ] = None,
    user_history_prompt: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="words of each user's own that follow")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="R", min=0.001, help="requests per second that you have (default: the trace's)"),
    ] = None,
    ttft: Ttft = None,
    gap: Gap = None,
    share: Share = 0.9,
    minutes: Annotated[float, typer.Option(metavar="M", min=0.2, help="for all of it")] = 9.0,
    batch_sizes: Annotated[
        str,
        typer.Option(metavar="N,N", help="max-num-batched-tokens of aggregated engines, beside the file's"),
    ] = "",
    seed: Annotated[int, typer.Option(metavar="N", help="of prompts and arrivals")] = 1,
    clients: Annotated[
        str, typer.Option(metavar="N,N", help="closed loops instead: so many clients each, as 1,8,32")
    ] = "",
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="of closed loops, each measures everything once")
    ] = 3,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.2, help="that a closed loop is measured in each turn")
    ] = 3.0,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the winner there, for pdserve serve -f")
    ] = None,
    json: Json = None,
    plot: Plot = None,
) -> int:
    """Should I disaggregate? Runs your load against aggregated and disaggregated graphs of the same hardware, in turn,
    and says which one to run and why; also when the answer is "don't".

    Candidates: one vLLM engine with all of the hardware of FILE's graph, at several --batch-sizes, on a CPU also with
    a thread less than it has cores; as many engines as the graph has workers; the graph of FILE and other splits, each
    with several thresholds. The best of each kind are measured by their goodput, the highest rate at which 90 % of the
    requests keep --ttft and --gap, and the aggregated one twice, to know the noise.

    The load is a trace (lines as {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [...]}
    of the open Mooncake traces; only the lengths are needed), chats where one of --num-users, --num-rounds,
    --shared-system-prompt, --user-history-prompt is given, else single requests with --prompt-tokens. With --rate, or
    the times of a trace, the answer is for that rate; without, for the highest that can be carried.

    With --clients there is no SLO: closed loops of so many clients measure TTFT, ITL, tokens/s and CPU (of each process
    in the JSON) of the best single engine of several settings and of FILE's graph (all prompts local, all remote, and
    as it decides), in alternating order, with ratios and noise, and compare the answers token for token.

    Nothing else should run on the machine. Ctrl-C shows what is known by then. The exit code is 0 whatever the answer,
    and 1 where requests of closed loops failed.

    examples:
      pdserve compare -f configs/local.yaml                       nine minutes; the bundled model on this machine
      pdserve compare -f configs/local.yaml --rate 2 --ttft 300ms --gap 50ms --plot answer
      pdserve compare -f configs/local.yaml --clients 1,8,32 --json closed.json
      pdserve compare -f configs/disagg.yaml --trace users.jsonl --minutes 40 --write best.yaml
    """
    check_outputs(json, plot)
    check_outputs(write, None)
    shape = (num_users, num_rounds, shared_system_prompt, user_history_prompt)
    if clients:
        if trace or write or rate is not None or any(value is not None for value in shape):
            raise ConfigError(
                ["--clients: closed loops take no --trace, no chats, no --rate and no --write."]
            )
        sizes, loads = tuple(numbers("--batch-sizes", batch_sizes)), sorted(numbers("--clients", clients))
        closed = ClosedOptions(tuple(loads), prompt_tokens, answer_len, rounds, seconds, sizes, seed)
        return _closed(file, closed, json, plot)
    if trace is not None and any(value is not None for value in shape):
        raise ConfigError(["--trace is one load, --num-users and the like are another: give one of them."])
    if trace is not None:
        load, asked = _trace(trace, file)
    elif any(value is not None for value in shape):
        load, asked = _chats(shape, answer_len), None
    else:
        load, asked = _single(prompt_tokens, answer_len, seed), None
    options = CompareOptions(
        file,
        read_slo(ttft, gap, file),
        share,
        rate if rate is not None else asked,
        minutes,
        tuple(numbers("--batch-sizes", batch_sizes)),
        seed,
    )
    comparison = Comparison.prepare(options, load)

    async def work() -> None:
        with Schedule() as schedule:
            await comparison.run(schedule)

    def report(complete: bool) -> Report | None:
        if not complete and not any(each.probes for each in comparison.entrants):
            return None
        found = comparison.recommendation()
        winner = comparison.candidate(found)
        if write is not None and winner is not None:
            write.write_text(winning_file(comparison, winner, found))
        return report_of(comparison, complete, write if winner is not None else None)

    return run_and_show(work, report, json, plot)


def _closed(file: Path, options: ClosedOptions, json: Path | None, plot: Path | None) -> int:
    maker = maker_of(file)
    longest = longest_of(maker.config)
    if longest and options.prompt_tokens + options.answer_len > longest:
        raise ConfigError(
            [f"--prompt-tokens {options.prompt_tokens}: with the answer over max-model-len {longest}."]
        )
    loops = ClosedLoops.of(options, maker)

    async def work() -> None:
        with Schedule() as schedule:
            await loops.run(schedule)

    def report(complete: bool) -> Report | None:
        return closed_report(loops, complete) if loops.screened or loops.measured else None

    return run_and_show(work, report, json, plot, lambda: loops.outcomes["failed"] > 0)


def _trace(trace: Path, file: Path) -> tuple[UserLoad, float | None]:
    found = read_trace(trace)
    if longest := longest_of(load(file, {})):
        found = found.within(longest)

    async def make(endpoint: Endpoint) -> Scalable:
        return replace(found, tokens_per_word=(await learn_prompts(endpoint, 0)).tokens_per_word)

    prompts = tuple(request.prompt_tokens for request in found.requests)
    described = f"{found.name}: {found.describe()}"
    return UserLoad(described, make, prompts, found.shared > _SHARED), found.rate if found.timed else None


def longest_of(config: Config) -> int:
    """max-model-len of the file, 0 where it says none."""
    return int(str(config.decode.engine_args.get("max-model-len", 0))) if config.decode else 0


def _chats(shape: tuple[int | None, ...], answer_len: int) -> UserLoad:
    names = ("num_users", "num_rounds", "shared_system_prompt", "user_history_prompt")
    given = {name: value for name, value in zip(names, shape, strict=True) if value is not None}
    chats = MultiRound(answer_len=answer_len, **given)

    async def make(endpoint: Endpoint) -> Scalable:
        return chats

    first = chats.shared_system_prompt + chats.user_history_prompt
    described = (
        f"chats of {chats.num_rounds} rounds, {chats.shared_system_prompt} words shared and "
        f"{chats.user_history_prompt} of each user, {answer_len} tokens out"
    )
    rounds = tuple(first + number * (answer_len + 20) for number in range(chats.num_rounds))
    return UserLoad(described, make, rounds, shared=True)


def _single(prompt_tokens: int, answer_len: int, seed: int) -> UserLoad:
    async def make(endpoint: Endpoint) -> Scalable:
        return PoissonRequests(await learn_prompts(endpoint, seed), prompt_tokens, answer_len)

    described = f"{prompt_tokens} tokens in, {answer_len} out"
    return UserLoad(described, make, (prompt_tokens,), shared=False)
