"""One graph and one vLLM server for this folder."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.conformance.pair import Pair
from tests.conformance.parsers.thinking import Thinking, make_model
from tests.e2e.graph import serving
from tests.real import ARGUMENTS, graph_yaml, one_vllm
from tools.demo_model import adapters

PARSERS = {"tool-call-parser": "hermes", "enable-auto-tool-choice": True, "reasoning-parser": "qwen3"}
LORA = {"enable-lora": True, "max-loras": 2, "max-lora-rank": 8}
ALLOWED = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@pytest.fixture(scope="package")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinking]:
    """The graph's file has the first adapter; `test_adapters` loads the second later. vLLM starts with both."""
    folder = tmp_path_factory.mktemp("thinking")
    model, folders = make_model(folder / "model"), adapters.make(folder / "adapters")
    modules = [f"{name}={path}" for name, path in folders.items()]
    yaml = graph_yaml()
    shared = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in LORA.items())
    yaml = yaml.replace("model: demo", f"model: {model}").replace("Common:\n", f"Common:\n{shared}")
    yaml = yaml.replace("dtype]", f"dtype, {', '.join(LORA)}]") + f"Processor: {json.dumps(PARSERS)}\n"
    own = f"VllmWorker:\n  scheduling-policy: priority\n  lora-modules: {json.dumps(modules[:1])}\n"
    yaml = yaml.replace("VllmWorker:\n", own)
    given = PARSERS | LORA | {"scheduling-policy": "priority"}
    options = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
    arguments = [*ARGUMENTS.split(), *options, "--lora-modules", *modules]
    for name in ("graph", "vllm"):
        (folder / name).mkdir()
    with ExitStack() as stack:
        # only vLLM starts in a thread, because a graph would end with the thread that started it
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(stack.enter_context, one_vllm(folder / "vllm", model, arguments, ALLOWED))
            graph = stack.enter_context(serving(yaml, folder / "graph", ALLOWED))
            vllm = starting.result()
        yield Thinking(graph, stack.enter_context(Pair(graph.url, vllm.url)), folders)


@pytest.fixture(scope="package")
def pair(thinking: Thinking) -> Pair:
    return thinking.pair
