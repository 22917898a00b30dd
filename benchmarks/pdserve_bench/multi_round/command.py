"""The command `pdserve bench multi-round`."""

import asyncio
from typing import Annotated

import typer

from pdserve.cli.options import GraphFile
from pdserve.util.errors import Unavailable
from pdserve_bench.client import Exchange
from pdserve_bench.endpoint import Endpoint, find_endpoint, key_headers, server_url
from pdserve_bench.measure.report import check_outputs
from pdserve_bench.measure.runs import LoadRun, run_and_show
from pdserve_bench.multi_round.summary import MultiRoundResult
from pdserve_bench.multi_round.workload import MultiRound, Texts
from pdserve_bench.options import ApiKey, BaseUrl, Json, Model, Seed, seed_of
from pdserve_bench.progress import begin, say


def multi_round(
    base_url: BaseUrl = None,
    file: GraphFile = None,
    model: Model = "",
    api_key: ApiKey = "",
    time_: Annotated[
        float, typer.Option("--time", metavar="S", min=1.0, help="seconds during which questions start")
    ] = 40.0,
    num_users: Annotated[
        int, typer.Option(metavar="N", min=1, help="active users, if the server keeps up")
    ] = 20,
    num_rounds: Annotated[int, typer.Option(metavar="N", min=1, help="questions per user")] = 3,
    qps: Annotated[
        float, typer.Option(metavar="Q", min=0.001, help="a user asks every num-users / qps seconds")
    ] = 10.0,
    shared_system_prompt: Annotated[
        int, typer.Option(metavar="N", min=0, help="words shared by all chats, about one token each")
    ] = 200,
    user_history_prompt: Annotated[
        int, typer.Option(metavar="N", min=0, help="words of each user's own history")
    ] = 400,
    answer_len: Annotated[int, typer.Option(metavar="N", min=1, help="tokens per response")] = 40,
    warm_up: Annotated[
        int, typer.Option(metavar="N", min=0, help="warm-up requests, which do not count")
    ] = 10,
    wait: Annotated[
        float, typer.Option(metavar="S", min=0.0, help="seconds to wait for the last responses")
    ] = 60.0,
    seed: Seed = None,
    json: Json = None,
) -> int:
    """Multi-round QA: users join over time, hold a chat of --num-rounds questions each, and leave.

    A chat begins with a system prompt that all users share and the user's own history, and continues with the server's
    real responses, so prefix caches count. A user asks every num-users / qps seconds, but only once it has the
    previous response. Users join at regular intervals, so that --num-users are active if the server keeps up, and more
    if it does not. Together they ask qps x num-rounds / (num-rounds - 1) questions a second: with 3 rounds and --qps
    10, 15 requests/s. Flags, arithmetic and summary are those of multi-round-qa of vLLM's production stack.

    No question starts after --time, but the last responses are awaited, and the summary's rates include that wait.
    Ctrl-C shows the result so far. Exit code 1 if no question succeeded, 130 after Ctrl-C.

    examples:
      pdserve bench multi-round                  the running graph of this machine
      pdserve bench multi-round --json rounds.json
      pdserve bench multi-round --time 60 --num-users 20 --num-rounds 3 --qps 10 \\
          --shared-system-prompt 1000 --user-history-prompt 2000 --answer-len 100 \\
          --model RAG_LLM --base-url http://0.0.0.0:8009/v1
    """
    check_outputs(json)
    load = MultiRound(
        num_users=num_users,
        num_rounds=num_rounds,
        qps=qps,
        shared_system_prompt=shared_system_prompt,
        user_history_prompt=user_history_prompt,
        answer_len=answer_len,
        seconds=time_,
        patience=wait,
        seed=seed_of(seed),
    )
    results: list[MultiRoundResult] = []

    async def work() -> None:
        url = await server_url(base_url, file)
        endpoint = await find_endpoint(url, model, key_headers(api_key), chat=True)
        if (grown := load.longest_chat) > endpoint.max_model_len > 0:
            say(
                f"a chat grows to about {grown} tokens, and the model's context has {endpoint.max_model_len}: "
                "expect its last questions to be refused"
            )
        await _warm_up(endpoint, load, warm_up)
        results.append(MultiRoundResult(load, endpoint, LoadRun()))
        begin("questions", load.seconds)
        await load.run(endpoint, results[0].run)

    return run_and_show(
        work,
        lambda complete: results[0].report(complete) if results else None,
        json,
        lambda: not results[0].finished,
    )


async def _warm_up(endpoint: Endpoint, load: MultiRound, count: int) -> None:
    """Raises Unavailable if no request succeeds."""
    texts = Texts(0, 0, load.seed)
    asked = [Exchange(endpoint.body(texts.warm_up(number), load.answer_len)) for number in range(count)]
    await asyncio.gather(*(endpoint.ask(exchange, load.timeout) for exchange in asked))
    if asked and all(exchange.error for exchange in asked):
        raise Unavailable(f"{endpoint.url} answers no request of the warm-up: {asked[0].error}")
