"""The command `pdserve bench goodput`."""

import asyncio
from typing import Annotated

import typer

from pdserve.cli.options import GraphFile
from pdserve_bench.endpoint import find_endpoint, key_headers, learn_prompts, server_url
from pdserve_bench.goodput.measure import GoodputOptions
from pdserve_bench.goodput.result import GoodputResult, find_goodput, report_of
from pdserve_bench.measure.report import check_outputs
from pdserve_bench.measure.runs import PATIENCE, PoissonRequests, run_and_show
from pdserve_bench.measure.slo import read_slo
from pdserve_bench.options import (
    AnswerLen,
    ApiKey,
    BaseUrl,
    Gap,
    Json,
    Model,
    PromptTokens,
    Seed,
    Share,
    Ttft,
    seed_of,
)


def goodput(
    base_url: BaseUrl = None,
    file: GraphFile = None,
    model: Model = "",
    api_key: ApiKey = "",
    ttft: Ttft = None,
    gap: Gap = None,
    share: Share = 0.9,
    prompt_tokens: PromptTokens = 1300,
    answer_len: AnswerLen = 64,
    chat: Annotated[
        bool, typer.Option("--chat/--completions", help="ask /v1/chat/completions or /v1/completions")
    ] = False,
    start_rate: Annotated[
        float, typer.Option(metavar="R", min=0.001, help="requests per second of the first probe")
    ] = 4.0,
    precision: Annotated[
        float, typer.Option(metavar="P", min=0.02, max=1.0, help="relative width of the final interval")
    ] = 0.1,
    seconds_: Annotated[
        float, typer.Option("--seconds", metavar="S", min=1.0, help="seconds of load per probe")
    ] = 20.0,
    within: Annotated[
        float, typer.Option(metavar="S", min=1.0, help="seconds; no probe starts that would end later")
    ] = 600.0,
    seed: Seed = None,
    json: Json = None,
) -> int:
    """Find the goodput of a server: the highest rate of Poisson arrivals at which 90 % of the requests (--share) get
    their first token within --ttft and have no gap between two tokens longer than --gap.

    Each probe sends requests at one rate for --seconds and waits until the server is idle again. The rate rises or
    falls from --start-rate until one rate is carried and a higher one is not. Then the interval is narrowed to
    --precision. Its ends get up to three probes each, until they are certain. This usually takes three
    to six minutes. Ctrl-C shows the result so far.

    A second run with the same --seed sends the same prompts, which may be in the server's prefix cache. Run the
    benchmark on another machine if you can; the report says when the load generator itself was late.

    examples:
      pdserve bench goodput                                     the running graph of this machine
      pdserve bench goodput --base-url http://gpu7:8000/v1 --ttft 1s --gap 100ms
      pdserve bench goodput --prompt-tokens 4000 --answer-len 250 --seconds 60 --start-rate 1 --within 1800
      OPENAI_API_KEY=... pdserve bench goodput --base-url https://llm.example.com/v1 --chat --json out.json
    """
    options = GoodputOptions(
        slo=read_slo(ttft, gap, file),
        share=share,
        seconds=seconds_,
        start_rate=start_rate,
        precision=precision,
        budget=within,
        seed=seed_of(seed),
    )
    check_outputs(json)
    result = GoodputResult(options)
    url = asyncio.run(server_url(base_url, file))
    title = [f"Goodput of {url}"]

    async def work() -> None:
        endpoint = await find_endpoint(url, model, key_headers(api_key), chat)
        endpoint.check_length(prompt_tokens, answer_len)
        longest = options.slo.ttft + answer_len * options.slo.gap
        prompts = await learn_prompts(endpoint, options.seed)
        users = PoissonRequests(prompts, prompt_tokens, answer_len, patience=max(PATIENCE, longest))
        title[0] = (
            f"Goodput of {endpoint.model} at {endpoint.url}: {prompt_tokens} tokens in, {answer_len} out"
        )
        await find_goodput(endpoint, users, result)

    return run_and_show(
        work,
        lambda complete: report_of(result, title[0]) if complete or result.probes else None,
        json,
        lambda: not (result.search.carried or result.search.broken),  # fails if there is no result
    )
