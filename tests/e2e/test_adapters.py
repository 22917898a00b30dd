"""LoRA adapters on real engines: token for token what one vLLM server with the same adapters says, whether prompts
are prefilled remotely, their KV is cached, or their worker is killed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pdserve_bench.client import Exchange, LoadClient

from pdserve.ports import free_port
from tests.conditions import until
from tests.e2e.cases import Case, identity_cases
from tests.e2e.graph import RealGraph, serving
from tests.real import ARGUMENTS, GRAPH, KEY, Reference, one_vllm
from tools.demo_model import adapters as tiny

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
MODELS = ("demo", *tiny.NAMES)
CASES = [case for case in identity_cases() if case.name in ("length-32", "length-300", "length-1501")]
LONG = Case("long", CASES[-1].prompt, 400)
LORA = {"enable-lora": "true", "max-loras": "2", "max-lora-rank": "8"}
ALLOWED = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny.make(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def expected(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], list[int]]:
    """By model and case, from a server that is gone when the graph starts."""
    arguments = [*ARGUMENTS.split(), "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    arguments += ["--lora-modules", *(f"{name}={path}" for name, path in folders.items())]
    with one_vllm(tmp_path_factory.mktemp("vllm"), arguments=arguments) as reference:
        return {
            (model, case.name): _ask(reference, model, case) for model in MODELS for case in (*CASES, LONG)
        }


def _ask(reference: Reference, model: str, case: Case) -> list[int]:
    headers = {"authorization": f"Bearer {KEY}"}
    url = f"{reference.url}/v1/completions"
    answer = httpx.post(url, json=case.body(model=model), headers=headers, timeout=300)
    found: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
    return found


@pytest.fixture(scope="module")
def adapted(
    expected: dict[tuple[str, str], list[int]],
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RealGraph]:
    """Its file names the first adapter; the second is loaded while it runs."""
    yaml = GRAPH.format(port=free_port("127.0.0.1"), kv_port=free_port("127.0.0.1", 2), decode=1, prefill=1)
    shared = "".join(f"  {name}: {value}\n" for name, value in LORA.items())
    yaml = yaml.replace("Common:\n", f"Common:\n{shared}").replace("dtype]", f"dtype, {', '.join(LORA)}]")
    module = f"{tiny.NAMES[0]}={folders[tiny.NAMES[0]]}"
    yaml = yaml.replace("VllmWorker:\n", f"VllmWorker:\n  lora-modules: [{module}]\n")
    with serving(yaml, tmp_path_factory.mktemp("adapted"), ALLOWED) as graph:
        name = tiny.NAMES[1]
        body = {"lora_name": name, "lora_path": str(folders[name])}
        loaded = httpx.post(f"{graph.url}/v1/load_lora_adapter", json=body, timeout=90)
        assert loaded.status_code == 200, loaded.text
        yield graph


async def _complete(graph: RealGraph, model: str, case: Case, *, stream: bool) -> Exchange:
    exchange = Exchange(case.body(model=model, stream=stream))
    await LoadClient(graph.url).ask(exchange, 300)
    assert not exchange.error, exchange.error
    return exchange


def test_each_adapter_answers_otherwise(expected: dict[tuple[str, str], list[int]]) -> None:
    for case in CASES:
        answers = {tuple(expected[model, case.name]) for model in MODELS}
        assert len(answers) == len(MODELS), case.name


async def test_the_graph_answers_as_one_server(
    adapted: RealGraph, expected: dict[tuple[str, str], list[int]]
) -> None:
    """The same prompts for each model, together, and again from the prefix caches."""
    jobs = [(model, case) for case in CASES for model in MODELS]
    for stream in (False, True):
        answers = await asyncio.gather(*(_complete(adapted, *job, stream=stream) for job in jobs))
        for (model, case), answer in zip(jobs, answers, strict=True):
            assert answer.tokens == expected[model, case.name], (model, case.name)
        ways = {case.name: answer.prefill for (_, case), answer in zip(jobs, answers, strict=True)}
        assert ways["length-1501"] == ("local" if stream else "remote")


async def test_streams_go_on_at_a_stand_in(
    adapted: RealGraph, expected: dict[tuple[str, str], list[int]]
) -> None:
    """The only decode worker is killed, and a name is unloaded meanwhile."""
    asked = [Exchange(LONG.body(model=model, stream=True)) for model in MODELS]
    running = [asyncio.create_task(LoadClient(adapted.url).ask(exchange, 300)) for exchange in asked]
    await until(lambda: all(len(exchange.arrivals) > 20 for exchange in asked), 60)
    async with httpx.AsyncClient(base_url=adapted.url, timeout=30) as client:
        unloaded = await client.post("/v1/unload_lora_adapter", json={"lora_name": tiny.NAMES[1]})
        assert unloaded.status_code == 200, unloaded.text
        for victim in adapted.processes():
            if "decode" in victim.cmdline():
                victim.kill()
        await asyncio.gather(*running)
        for model, exchange in zip(MODELS, asked, strict=True):
            assert not exchange.error, exchange.error
            assert exchange.tokens == expected[model, LONG.name], model
        gone = await client.post("/v1/completions", json=LONG.body(model=tiny.NAMES[1]))
        assert gone.status_code == 404
