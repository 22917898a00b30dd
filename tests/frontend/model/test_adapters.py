"""LoRA adapters as clients see them: vLLM's names, routes and errors, over workers with simulated engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdserve.engine.sim.engine import SimEngine
from pdserve.engine.sim.model import SimModel
from pdserve.errors import ConfigError, Unavailable
from pdserve.frontend.edge import paths
from pdserve.frontend.model.adapters import AdapterStore
from pdserve.records import Adapter, Instance, Role, encode_record
from pdserve.registry import keys
from pdserve.registry.view import RegistryView
from tests.conditions import until
from tests.engine.sims import adapter_in, generated
from tests.frontend.conftest import Graph, card, running_graph
from tests.frontend.model.sims import sim_engines
from tests.memory.registry import MemoryRegistry, MemoryServer

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [300 + (7 * number) % 600 for number in range(300)]
LORA = {"enable-lora": True, "max-loras": 2, "max-cpu-loras": 3}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Adapted(Graph):
    """Two decode workers and a prefill worker, whose file names the adapter `red`."""

    engines: list[SimEngine]
    """decode engines first"""

    async def ask(self, model: str, count: int = 8, prompt: list[int] = PROMPT) -> list[int]:
        answer = await self.complete(model, count, prompt)
        found: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
        return found

    async def complete(self, model: str, count: int = 8, prompt: list[int] = PROMPT) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": count, "return_token_ids": True}
        return await self.http.post("/v1/completions", json=body | {"temperature": 0})

    async def post(self, path: str, **body: object) -> httpx.Response:
        return await self.http.post(path, json=body)

    def number(self, name: str) -> int:
        return {adapter.name: adapter.id for _, adapter in self.models.adapters()}[name]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Adapted]:
    at = tmp_path_factory.mktemp("adapters")
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        patch.setattr(
            "vllm.envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING", True, raising=False
        )  # it may have been read
        routes = frozenset({LOAD, UNLOAD})
        patch.setattr("pdserve.frontend.app.WITH_BODY", paths.WITH_BODY | routes)
        graph = Adapted()
        await graph.start(stack, at)
        modules = [f"red={adapter_in(at, 'red')}"]
        engines = sim_engines(graph, 2, 1, args={**LORA, "lora-modules": modules})
        graph.engines = await stack.enter_async_context(engines)
        await until(lambda: bool(graph.models.adapters()))
        yield graph


async def test_an_adapter_is_a_name_beside_its_model(adapted: Adapted, tmp_path: Path) -> None:
    listed = {each["id"]: each for each in (await adapted.http.get("/v1/models")).json()["data"]}
    assert listed["red"]["parent"] == "demo"
    assert listed["red"]["root"].endswith("/red")
    assert listed["demo"]["parent"] is None
    assert (await adapted.http.get("/v1/models/red")).json() == listed["red"]
    answer = (await adapted.complete("red")).json()
    assert answer["model"] == "red"
    assert answer["choices"][0]["token_ids"] == generated(PROMPT, 8, adapted.number("red"))
    assert await adapted.ask("demo") == generated(PROMPT, 8, 0)
    unknown = await adapted.complete("green")
    assert unknown.status_code == 404
    message = unknown.json()["error"]["message"]
    assert message == "The model `green` does not exist. Valid aliases: demo."


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "\u00e9" * 129, "lora_path": "/x"}, "'lora_name' has 258 bytes"),
        ({"lora_name": "x", "lora_path": "/" * 4097}, "bytes, but may have 4,096."),
    ],
)
async def test_names_and_paths_are_bounded(adapted: Adapted, body: dict[str, str], message: str) -> None:
    """(All other errors are vLLM's: tests/e2e/test_adapters.py.)"""
    answer = await adapted.post(LOAD, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "InvalidUserInput")
    assert message in error["message"]


async def test_a_request_goes_on_with_its_adapter_when_its_worker_dies(
    adapted: Adapted, tmp_path: Path
) -> None:
    """And while the adapter is unloaded."""
    path = str(adapter_in(tmp_path, "green"))
    await adapted.post(LOAD, lora_name="green", lora_path=path)
    green = adapted.number("green")
    prompts = [[PROMPT[number], *PROMPT[1:]] for number in range(6)]
    asked = [asyncio.create_task(adapted.complete("green", 200, prompt)) for prompt in prompts]
    asked += [asyncio.create_task(adapted.complete("demo", 200, prompt)) for prompt in prompts]
    engines = adapted.engines[:2]
    await until(lambda: sum(engine.usage.running for engine in engines) == len(asked))
    assert (await adapted.post(UNLOAD, lora_name="green")).status_code == 200
    engines[0].die()
    answers = [(await each).raise_for_status() for each in asked]
    assert {answer.headers["x-pdserve-retries"] for answer in answers} == {"0", "1"}
    for number, answer in enumerate(answers):
        found = list(prompts[number % 6])
        for _ in range(200):
            found.append(SimModel().next_token(found, green if number < 6 else 0))
        assert answer.json()["choices"][0]["token_ids"] == found[len(PROMPT) :]
    assert (await adapted.complete("green")).status_code == 404


async def test_without_workers_an_adapter_waits_as_its_model_does(tmp_path: Path) -> None:
    red = Adapter("red", "/red", 5)
    worker = Instance("decode-0-gone", Role.DECODE, "demo", "tcp://127.0.0.1:9", adapters=[red])
    async with running_graph(tmp_path) as graph:
        async with MemoryRegistry(graph.registry) as registry:
            await registry.put(keys.instance(worker), encode_record(worker))
            await registry.put(keys.card("demo", worker.id), encode_record(card()))
            await until(lambda: bool(graph.models.known()))
            assert "red" in graph.models.find("red").adapters
        await until(lambda: not graph.models.known())
        assert graph.models.find("red") is graph.models.find("demo")


async def test_what_another_frontend_writes_at_once_ends_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MemoryRegistry(MemoryServer()) as registry, RegistryView(registry) as view:
        put = registry.put

        async def overtaken(key: str, value: bytes, *, leased: bool = True) -> None:
            await put(key, value, leased=leased)
            await put(key, encode_record(Adapter("red", asked="theirs", model="demo")), leased=False)

        monkeypatch.setattr(registry, "put", overtaken)
        async with asyncio.timeout(10):
            await AdapterStore(registry, view).unload("demo", "red")


RED, BLUE = Adapter("red", "/red", 5), Adapter("blue", "/blue", 6, asked="mine", model="other")


@pytest.mark.parametrize(
    ("name", "error"),
    [("other", ConfigError), ("red", ConfigError), ("blue", ConfigError), ("gone", Unavailable)],
)
async def test_a_name_of_another_model_or_its_adapter_is_taken(
    name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose workers restart; not one that was unloaded, though an engine may hold it yet. (What is not taken
    waits for workers.)"""
    monkeypatch.setattr("pdserve.frontend.model.adapters.WITHIN", 0.0)
    held = Adapter("gone", "/gone", 7, asked="before")
    worker = Instance("decode-0-x", Role.DECODE, "other", adapters=[RED, held])
    async with MemoryRegistry(MemoryServer()) as registry, RegistryView(registry) as view:
        await registry.put(keys.instance(worker), encode_record(worker))
        await registry.put(keys.card("other", worker.id), encode_record(card()))
        for kept in (BLUE, Adapter("gone", asked="now", model="other")):
            await registry.put(keys.adapter(kept), encode_record(kept), leased=False)
        await until(lambda: len(view.adapters("other")) == 2 and bool(view.cards() and view.instances()))
        with pytest.raises(error):
            await AdapterStore(registry, view).load("demo", name, "/x")
        await until(lambda: view.loading("demo") == [])
