"""The command `pdserve bench promise`."""

from typing import Annotated

import typer

from pdserve.cli.find import GraphAddress, find_graph
from pdserve.cli.options import GraphFile
from pdserve.contract.slo import parse_duration
from pdserve.registry import connect
from pdserve.util.errors import ConfigError
from pdserve_bench.endpoint import find_endpoint, frontend_url, key_headers, learn_prompts
from pdserve_bench.measure.report import check_outputs
from pdserve_bench.measure.runs import PoissonRequests, run_and_show
from pdserve_bench.measure.slo import Slo
from pdserve_bench.options import AnswerLen, ApiKey, Json, Model, PromptTokens, Seed, rates_of, seed_of
from pdserve_bench.promise.arms import OFF, WAYS, ArmsRun, Switch, arm_of, compare_arms
from pdserve_bench.promise.result import report_of

PATIENCE = 30.0
"""Seconds until a request counts as failed."""
PROMISES = ("chat=500ms/60ms", "agent=200ms/100ms", "rag=2s/40ms")


def promise(
    file: GraphFile = None,
    model: Model = "",
    api_key: ApiKey = "",
    promises: Annotated[
        list[str] | None,
        typer.Option(
            "--promise", metavar="NAME=TTFT/GAP", help=f"may be repeated (default: {', '.join(PROMISES)})"
        ),
    ] = None,
    rates: Annotated[str, typer.Option(metavar="R,...", help="requests per second")] = "4,6,8",
    ways: Annotated[
        bool, typer.Option("--ways", help="also run without SLO: all prompts remote, and all local")
    ] = False,
    prompt_tokens: PromptTokens = 1300,
    answer_len: AnswerLen = 64,
    seconds_: Annotated[
        float, typer.Option("--seconds", metavar="S", min=1.0, help="total duration")
    ] = 480.0,
    seed: Seed = None,
    json: Json = None,
) -> int:
    """Measure what a promise (SLO) gains. At each rate (Poisson arrivals), the running graph gets requests without an
    SLO, then with each promise set live; then all again in reverse order. The report compares how many requests kept a
    promise while it was set and without an SLO. The settings are restored at the end. Nothing else should use the
    graph.

    examples:
      pdserve bench promise                                             three promises in eight minutes
      pdserve bench promise --rates 4,6,8,10 --json promise.json
      pdserve bench promise --ways --promise chat=500ms/60ms            is the default policy ever slower?
    """
    judged = dict(_promise(text) for text in promises or PROMISES)
    arms = [OFF, *(arm_of(name, slo) for name, slo in judged.items()), *(WAYS if ways else ())]
    result = ArmsRun(judged, rates_of("--rates", rates), arms, seconds_, seed_of(seed))
    check_outputs(json)
    graph = find_graph(file, None, None)
    title = f"The promise, {prompt_tokens} tokens in, {answer_len} out"
    users = prompt_tokens, answer_len
    return run_and_show(
        lambda: _compare(graph, model, key_headers(api_key), users, result),
        lambda complete: (
            report_of(result, title) if any(made.counted for _, made in result.windows) else None
        ),
        json,
        lambda: not result.complete,
    )


async def _compare(
    graph: GraphAddress, model: str, headers: dict[str, str], shape: tuple[int, int], result: ArmsRun
) -> None:
    endpoint = await find_endpoint(await frontend_url(graph), model, headers)
    endpoint.check_length(*shape)
    prompts = await learn_prompts(endpoint, result.seed)
    async with (
        connect(graph.etcd, graph.namespace, graph.credentials) as registry,
        Switch.on(registry) as switch,
    ):
        users = PoissonRequests(prompts, *shape, patience=PATIENCE)
        await compare_arms(endpoint, users, switch, result)


def _promise(text: str) -> tuple[str, Slo]:
    name, _, bounds = text.partition("=")
    ttft, _, gap = bounds.partition("/")
    try:
        if not name or name in {arm.name for arm in (OFF, *WAYS)}:
            raise ValueError("its name is missing or reserved")
        return name, Slo(parse_duration(ttft), parse_duration(gap))
    except ValueError as error:
        raise ConfigError([f"--promise {text}: {error}; write it as {PROMISES[0]}."]) from None
