"""LoRA adapters on real engines: token for token what one vLLM server with the same adapters says, whether prompts
are prefilled remotely or their KV is cached. (Where their worker dies: frontend/model/test_adapters.py.)"""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from pdserve_bench.client import Exchange, LoadClient
from safetensors.torch import load_file, save_file

from pdserve.ports import free_port
from tests.conformance.answers import Answer, Request
from tests.conformance.asking import CHAT, COMPLETIONS, MESSAGES, RESPONSES, body
from tests.conformance.pair import alone, same
from tests.e2e.cases import Case, identity_cases
from tests.e2e.graph import RealGraph, serving
from tests.real import ARGUMENTS, GRAPH, KEY, Reference, one_vllm
from tools.demo_model import adapters as tiny

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
MODELS = ("demo", *tiny.NAMES)
CASES = [case for case in identity_cases() if case.name in ("length-32", "length-300", "length-1501")]
LORA = {"enable-lora": "true", "max-loras": "2", "max-lora-rank": "8"}
ALLOWED = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RED, BLUE = tiny.NAMES
FOLDER, WIDE = "folder of blue", "folder of an adapter of a wider model"


def chat(name: str, model: str, **more: object) -> Request:
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    return Request(name, CHAT, asked | more)


def change(name: str, path: str, differs: str = "", **body: object) -> Request:
    return Request(name, path, body, differs=differs)


REQUESTS = [
    chat("an adapter", RED),
    chat("a stream", RED, stream=True, stream_options={"include_usage": True}),
    chat("logprobs", RED, logprobs=True, top_logprobs=2),
    *(Request(f"{path} {model}", path, body(path) | {"model": model})
      for path in (COMPLETIONS, RESPONSES, MESSAGES) for model in (BLUE, "green")),
    chat("unknown", "green"),
    *(Request(f"{path} {name}", path, content=content) for path in (LOAD, UNLOAD)
      for name, content in {"no JSON": b"x", "empty": b"{}", "list": b"[]"}.items()),
    *(Request(f"{path} by GET", path, method="GET", differs="unknown paths and methods") for path in (LOAD, UNLOAD)),
    change("no path", LOAD, lora_name="x"),
    change("an empty path", LOAD, lora_name="x", lora_path=""),
    change("no name", LOAD, lora_path="/x"),
    change("a number", LOAD, lora_name=1, lora_path="/x"),
    change("no folder", LOAD, lora_name="x", lora_path="/no/folder"),
    change("the model's name", LOAD, lora_name="demo", lora_path=FOLDER),
    change("there already", LOAD, lora_name=BLUE, lora_path=FOLDER),
    change("not there", UNLOAD, lora_name="green"),
    change("unloaded", UNLOAD, lora_name=BLUE),
    change("unloaded twice", UNLOAD, lora_name=BLUE),
    chat("not there any more", BLUE),
    change("of another model", LOAD, "an adapter that does not fit the model", lora_name="wide", lora_path=WIDE),
    chat("of another model, asked", "wide"),
    change("loaded again", LOAD, lora_name=BLUE, lora_path=FOLDER),
    chat("loaded again, asked", BLUE),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tiny.make(folder := tmp_path_factory.mktemp("adapters"))
    wide = folder / "wide"
    shutil.copytree(made[BLUE], wide)
    weights = load_file(file := wide / "adapter_model.safetensors")
    save_file({name: torch.cat([each, each], -1) for name, each in weights.items()}, file)
    return made


def with_folders(folders: dict[str, Path]) -> list[Request]:
    """`REQUESTS`, with folders that there are."""
    paths = {FOLDER: str(folders[BLUE]), WIDE: str(folders[BLUE].parent / "wide")}
    return [
        replace(each, json={key: paths.get(value, value) for key, value in each.json.items()})
        if each.path == LOAD and each.json
        else each
        for each in REQUESTS
    ]


@pytest.fixture(scope="module")
def said(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[tuple[str, str], list[int]], list[Answer]]:
    """Tokens by model and case, and the answers to `REQUESTS`, of a server that is gone when the graph starts."""
    arguments = [*ARGUMENTS.split(), "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    arguments += ["--lora-modules", *(f"{name}={path}" for name, path in folders.items())]
    with one_vllm(tmp_path_factory.mktemp("vllm"), arguments=arguments, variables=ALLOWED) as reference:
        tokens = {(model, case.name): _ask(reference, model, case) for model in MODELS for case in CASES}
        return tokens, [alone(reference.url, request) for request in with_folders(folders)]


@pytest.fixture(scope="module")
def expected(
    said: tuple[dict[tuple[str, str], list[int]], list[Answer]],
) -> dict[tuple[str, str], list[int]]:
    return said[0]


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


def test_conforms(
    adapted: RealGraph,
    said: tuple[dict[tuple[str, str], list[int]], list[Answer]],
    folders: dict[str, Path],
    subtests: pytest.Subtests,
) -> None:
    """In this order: each finds what those before have left."""
    for request, theirs in zip(with_folders(folders), said[1], strict=True):
        with subtests.test(request.name):
            same(request, alone(adapted.url, request), theirs)
