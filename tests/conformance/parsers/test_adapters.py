"""LoRA adapters on real engines: the same tokens as one vLLM server, for remote prefill and prefix hits. (Loss of a
worker: frontend/vllm/test_lora_adapters.py.)"""

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest
import torch
from pdserve_bench.client import Exchange, LoadClient
from safetensors.torch import load_file, save_file

from tests.conformance.answers import Request
from tests.conformance.asking import CHAT, COMPLETIONS, MESSAGES, RESPONSES, body
from tests.conformance.pair import Pair
from tests.conformance.parsers.thinking import Thinking
from tests.e2e.cases import identity_cases, tokens_of
from tests.real import Reference
from tools.demo_model import adapters

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MODELS = ("demo", *adapters.NAMES)
RED, BLUE = adapters.NAMES
JOBS = [
    (model, case)
    for case in identity_cases()
    if case.name in ("length-32", "length-300", "length-1501")
    for model in MODELS
]


def chat(name: str, model: str, **more: object) -> Request:
    return Request(name, CHAT, body(CHAT, "Hello", model=model, max_tokens=8, **more))


def change(name: str, path: str, differs: str = "", **body: object) -> Request:
    return Request(name, path, body, differs=differs)


def requests(blue: str, wide: str) -> list[Request]:
    """Return requests to send in this order, because some load and unload adapters. `blue`, `wide`: folders."""
    return [
        chat("an adapter", RED),
        chat("a stream", RED, stream=True, stream_options={"include_usage": True}),
        chat("logprobs", RED, logprobs=True, top_logprobs=2),
        *(Request(f"{path} {model}", path, body(path) | {"model": model})
          for path in (COMPLETIONS, RESPONSES, MESSAGES) for model in (BLUE, "green")),
        chat("an unknown adapter", "green"),
        *(Request(f"{path} {name}", path, content=content) for path in (LOAD, UNLOAD)
          for name, content in {"no JSON": b"x", "empty": b"{}", "list": b"[]"}.items()),
        *(Request(f"{path} by GET", path, method="GET", differs="unknown paths and methods")
          for path in (LOAD, UNLOAD)),
        change("load without a path", LOAD, lora_name="x"),
        change("load an empty path", LOAD, lora_name="x", lora_path=""),
        change("load without a name", LOAD, lora_path="/x"),
        change("load with a number as name", LOAD, lora_name=1, lora_path="/x"),
        change("load no folder", LOAD, lora_name="x", lora_path="/no/folder"),
        change("load by the model's name", LOAD, lora_name="demo", lora_path=blue),
        change("load twice", LOAD, lora_name=BLUE, lora_path=blue),
        change("unload an unknown adapter", UNLOAD, lora_name="green"),
        change("unload", UNLOAD, lora_name=BLUE),
        change("unload twice", UNLOAD, lora_name=BLUE),
        chat("the unloaded adapter", BLUE),
        change("load a wider one", LOAD, "an adapter that does not fit the model", lora_name="wide", lora_path=wide),
        chat("the wider adapter", "wide"),
        change("load again", LOAD, lora_name=BLUE, lora_path=blue),
        chat("the adapter that was loaded again", BLUE),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def blue(thinking: Thinking) -> str:
    """Load the second adapter into the graph. Return its folder."""
    folder = str(thinking.adapters[BLUE])
    asked = {"lora_name": BLUE, "lora_path": folder}
    loaded = httpx.post(f"{thinking.graph.url}{LOAD}", json=asked, timeout=90)
    assert loaded.status_code == 200, loaded.text
    return folder


@pytest.fixture
def wide(blue: str, tmp_path: Path) -> str:
    """The folder of an adapter of a wider model."""
    folder = shutil.copytree(blue, tmp_path / "wide")
    weights = load_file(file := folder / "adapter_model.safetensors")
    save_file({name: torch.cat([each, each], -1) for name, each in weights.items()}, file)
    return str(folder)


@pytest.mark.usefixtures("blue")
async def test_tokens_of_each_adapter_equal_those_of_one_server(thinking: Thinking) -> None:
    """Each model gets the same prompts, all at once, then once more with prefix hits."""
    async with Reference(thinking.pair.theirs).client() as client:
        theirs = [await tokens_of(client, case, model=model, cache_salt=model) for model, case in JOBS]
    assert len({tuple(tokens) for tokens in theirs}) == len(JOBS), (
        "all models and prompts have different tokens"
    )
    for stream in (False, True):
        asked = [Exchange(case.body(model=model, stream=stream)) for model, case in JOBS]
        await asyncio.gather(*(LoadClient(thinking.graph.url).ask(each, 300) for each in asked))
        assert [each.error for each in asked if each.error] == []
        assert [each.tokens for each in asked] == theirs
        assert asked[-1].prefill == ("local" if stream else "remote")


def test_responses_equal_vllms(pair: Pair, blue: str, wide: str, subtests: pytest.Subtests) -> None:
    for request in requests(blue, wide):
        with subtests.test(request.name):
            pair.same(request)
