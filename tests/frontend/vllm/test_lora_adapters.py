"""LoRA adapters as clients see them: vLLM's names, routes and errors, over workers with simulated engines."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio

from pdserve.contract.records import Adapter, Instance, Role, encode_record
from pdserve.engine.sim.engine import SimEngine
from pdserve.frontend.edge import paths
from pdserve.frontend.vllm.lora_adapters import AdapterStore
from pdserve.registry import keys
from pdserve.registry.base import Change
from pdserve.registry.view import RegistryView
from pdserve.util.errors import BadRequest, RegistryUnavailable, Unavailable
from tests.conditions import until
from tests.engine.sims import adapter_in, generated
from tests.frontend.conftest import Graph, card
from tests.frontend.model.sims import sim_engines
from tests.memory.registry import MemoryRegistry, MemoryServer

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [300 + (7 * number) % 600 for number in range(300)]
LORA = {"enable-lora": True, "max-loras": 2, "max-cpu-loras": 3}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
INVALID = "InvalidUserInput"


class Adapted(Graph):
    """Two decode workers and a prefill worker, configured with the adapter `red`."""

    engines: list[SimEngine]
    """decode engines first"""
    second: Graph
    """another frontend of the same graph"""

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
        # vllm.envs may have cached the value
        patch.setattr("vllm.envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING", True, raising=False)
        routes = frozenset({LOAD, UNLOAD})
        patch.setattr("pdserve.frontend.app.WITH_BODY", paths.WITH_BODY | routes)
        graph = Adapted()
        await graph.start(stack, at)
        modules = [f"red={adapter_in(at, 'red')}"]
        engines = sim_engines(graph, 2, 1, args={**LORA, "lora-modules": modules})
        graph.engines = await stack.enter_async_context(engines)
        graph.second = Graph("frontend-1-test", graph.registry)
        await graph.second.start(stack, at)
        await until(lambda: all(each.models.adapters() for each in (graph, graph.second)))
        yield graph


async def test_the_second_app_of_a_process_has_its_routes_once(adapted: Adapted) -> None:
    """vLLM adds the adapter routes to one router for all apps. If an app had them twice, `/openapi.json` would cause a
    warning, which fails a test."""
    assert LOAD not in (await adapted.second.http.get("/openapi.json")).raise_for_status().json()["paths"]


async def test_an_adapter_is_listed_and_served_beside_its_model(adapted: Adapted) -> None:
    listed = {each["id"]: each for each in (await adapted.http.get("/v1/models")).json()["data"]}
    assert listed["red"]["parent"] == "demo"
    assert listed["red"]["root"].endswith("/red")
    assert listed["demo"]["parent"] is None
    assert (await adapted.http.get("/v1/models/red")).json() == listed["red"]
    answer = (await adapted.complete("red")).json()
    assert answer["model"] == "red"
    assert answer["choices"][0]["token_ids"] == generated(PROMPT, 8, adapted.number("red"))
    assert await adapted.ask("demo") == generated(PROMPT, 8, 0)


async def test_names_and_paths_are_bounded(adapted: Adapted) -> None:
    """(All other errors are vLLM's: tests/conformance/parsers/test_adapters.py.)"""
    for name, path, said in (
        ("\u00e9" * 129, "/x", "'lora_name' has 258"),
        ("x", "/" * 4097, "may have 4,096"),
    ):
        answer = await adapted.post(LOAD, lora_name=name, lora_path=path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, INVALID)
        assert said in answer.json()["error"]["message"]


async def test_a_request_continues_with_its_adapter_when_its_worker_dies(
    adapted: Adapted, tmp_path: Path
) -> None:
    """The adapter is unloaded before the worker dies."""
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
        expected = generated(prompts[number % 6], 200, green if number < 6 else 0)
        assert answer.json()["choices"][0]["token_ids"] == expected
    assert (await adapted.complete("green")).status_code == 404


async def test_a_loaded_adapter_has_the_graphs_number_from_the_beginning(
    adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = adapted.processor().adapters
    assert adapters._store is not None
    registry, numbers = adapters._store._registry, list[int]()
    delete = registry.delete

    async def noting(key: str) -> None:
        if key == keys.claim("pink"):
            numbers.append(adapters._models.lora_requests["pink"].lora_int_id)
        await delete(key)

    monkeypatch.setattr(registry, "delete", noting)
    answer = await adapted.post(LOAD, lora_name="pink", lora_path=str(adapter_in(tmp_path, "pink")))
    assert (answer.status_code, numbers) == (200, [adapted.number("pink")])
    await adapted.post(UNLOAD, lora_name="pink")


async def test_an_unloaded_name_leaves_nothing_in_the_registry(adapted: Adapted, tmp_path: Path) -> None:
    """Training may load an adapter after each step. A record of the unloading stays only if the workers' files have the
    name."""

    def kept() -> list[str]:
        return [key.rpartition("/")[2] for key in adapted.registry.data if f"/{keys.ADAPTERS}" in key]

    async def load_and_unload(name: str) -> None:
        path = str(adapter_in(tmp_path, f"{name}-elsewhere"))
        assert (await adapted.post(LOAD, lora_name=name, lora_path=path)).status_code == 200
        assert kept() == [name]
        assert (await adapted.post(UNLOAD, lora_name=name)).status_code == 200
        assert (await adapted.complete(name)).status_code == 404

    for step in range(5):
        await load_and_unload(f"step-{step}")
        assert kept() == []
    assert (await adapted.post(UNLOAD, lora_name="red")).status_code == 200
    for _ in range(2):
        await load_and_unload("red")
        assert kept() == ["red"]
    await adapted.context.view._registry.delete(f"{keys.ADAPTERS}demo/red")
    await until(lambda: all(each.models.adapters() for each in (adapted, adapted.second)))


# ── several frontends ──


async def loads(*asked: tuple[Graph, Path], **more: object) -> list[int]:
    """Load each folder at its frontend, all at once, under the name `blue`. Return the statuses."""
    posts = [
        frontend.http.post(LOAD, json={"lora_name": "blue", "lora_path": str(path), **more})
        for frontend, path in asked
    ]
    answers = await asyncio.gather(*posts)
    for refused in (answer.json()["error"] for answer in answers if answer.status_code != 200):
        assert refused["type"] == INVALID
        assert re.search(r"is being loaded by another call\.|already been", refused["message"])
    return [answer.status_code for answer in answers]


async def test_if_two_frontends_load_one_name_from_two_folders_one_succeeds(
    adapted: Adapted, tmp_path: Path
) -> None:
    """No worker has the loser's folder. The loser's load succeeds once the name is free, or with `load_inplace`."""
    frontends: list[Graph] = [adapted, adapted.second]
    view = adapted.context.view
    for turn in range(2):
        folders = [adapter_in(tmp_path, f"{turn}-{number}") for number in range(2)]
        asked = list(zip(frontends, folders, strict=True))
        statuses = await loads(*asked)
        assert sorted(statuses) == [200, 400]
        winner, loser = statuses.index(200), statuses.index(400)
        workers = view.instances(model="demo")
        assert len(workers) > 1
        for worker in workers:
            paths = {each.path for each in worker.adapters or ()}
            assert str(folders[winner]) in paths
            assert str(folders[loser]) not in paths
        await until(lambda: all(len(each.models.adapters()) == 2 for each in frontends))
        assert await adapted.ask("blue") == generated(PROMPT, 8, adapted.number("blue"))
        assert await loads(asked[loser]) == [400]
        assert not [key for key in adapted.registry.data if keys.LOADING in key or keys.CLAIMS in key]
        assert await loads(asked[loser], load_inplace=True) == [200]
        assert view.adapters("demo")["blue"].path == str(folders[loser])
        post = frontends[loser].http.post
        assert (await post(UNLOAD, json={"lora_name": "blue"})).status_code == 200
        assert await loads(asked[loser]) == [200]
        assert (await post(UNLOAD, json={"lora_name": "blue"})).status_code == 200


class Late(MemoryRegistry):
    """A registry whose watch yields the first changes at once, and all later ones after `now` is set."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.now = asyncio.Event()

    async def watch(self, *prefixes: str) -> AsyncIterator[list[Change]]:
        async for changes in super().watch(*prefixes):
            yield changes
            await self.now.wait()


async def test_a_load_sees_what_another_frontend_loaded_just_before() -> None:
    server = MemoryServer()
    async with MemoryRegistry(server) as theirs, Late(server) as late, RegistryView(late) as view:
        red = Adapter("red", "/red", 5, asked="theirs", model="other")
        await theirs.put(keys.adapter(red), encode_record(red), leased=False)
        store = AdapterStore(late, view)

        async def claim(name: str) -> bool:
            async with store.claimed("demo", name):
                return "red" in view.adapters("other")

        taken, free = asyncio.create_task(claim("red")), asyncio.create_task(claim("green"))
        await until(lambda: len(server.data) == 3)
        assert not view.adapters("other")
        late.now.set()
        with pytest.raises(BadRequest, match="'red' is the name of another model, or of its adapter"):
            await taken
        assert await free
        assert list(server.data) == [f"/pdserve/{keys.adapter(red)}"]


async def test_a_name_is_free_when_the_frontend_that_was_loading_it_has_died() -> None:
    server = MemoryServer()
    async with (
        MemoryRegistry(server) as first,
        MemoryRegistry(server) as other,
        RegistryView(first) as view,
        RegistryView(other) as others,
    ):
        dying, store = AdapterStore(first, view), AdapterStore(other, others)
        async with dying.claimed("demo", "red"):
            loading = asyncio.create_task(dying.load("demo", "red", "/red"))
            await until(lambda: bool(others.loading("demo")))
            with pytest.raises(BadRequest, match="'red' is being loaded by another call"):
                async with store.claimed("other", "red"):
                    pass
            await server.kill(first)
            async with store.claimed("other", "red"):
                assert others.loading("demo") == []
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading


async def test_a_load_whose_claim_is_lost_meanwhile_is_not_kept() -> None:
    """Another frontend may have loaded other weights by this name since."""
    async with MemoryRegistry(MemoryServer()) as registry, RegistryView(registry) as view:
        store = AdapterStore(registry, view)
        async with store.claimed("demo", "red"):
            loading = asyncio.create_task(store.load("demo", "red", "/red"))
            await until(lambda: bool(view.loading("demo")))
            await registry.delete(keys.claim("red"))
            answer = msgspec.structs.replace(view.loading("demo")[0], id=5, model="")
            worker = Instance("decode-0-x", Role.DECODE, "demo", adapters=[answer])
            await registry.put(keys.instance(worker), encode_record(worker))
            with pytest.raises(RegistryUnavailable):
                await loading
        await until(lambda: view.loading("demo") == [])
        assert view.adapters("demo") == {}


async def test_an_adapter_without_workers_is_found_with_its_model(adapted: Adapted) -> None:
    lost = Adapter("lost", "/lost", 5)
    worker = Instance("decode-0-left", Role.DECODE, "left", "tcp://127.0.0.1:9", adapters=[lost])
    models = adapted.models
    async with MemoryRegistry(adapted.registry) as registry:
        await registry.put(keys.instance(worker), encode_record(worker))
        await registry.put(keys.card("left", worker.id), encode_record(card("left")))
        await until(lambda: "left" in models.usable_workers())
        assert "lost" in models.find("lost").adapters
    await until(lambda: "left" not in [card.name for card in models.known()])
    assert models.find("lost") is models.find("left")


async def test_a_call_ends_when_another_frontend_overwrites_its_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with MemoryRegistry(MemoryServer()) as registry, RegistryView(registry) as view:
        put = registry.put

        async def overtaken(key: str, value: bytes, *, leased: bool = True, holding: str = "") -> None:
            await put(key, value, leased=leased, holding=holding)
            await put(key, encode_record(Adapter("red", asked="theirs", model="demo")), leased=False)

        monkeypatch.setattr(registry, "put", overtaken)
        async with asyncio.timeout(10):
            await AdapterStore(registry, view).unload("demo", "red")


RED, BLUE = Adapter("red", "/red", 5), Adapter("blue", "/blue", 6, asked="mine", model="other")


@pytest.mark.parametrize(
    ("name", "error"),
    [("other", BadRequest), ("red", BadRequest), ("blue", BadRequest), ("unloaded", Unavailable)],
)
async def test_names_of_another_model_and_its_adapters_are_taken(
    name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`blue` is taken though no worker has it, because workers may restart. `unloaded` is free again, though an
    engine may still have it. Loading it fails only because `demo` has no worker."""
    monkeypatch.setattr("pdserve.frontend.vllm.lora_adapters.LOAD_TIMEOUT", 0.0)
    held = Adapter("unloaded", "/unloaded", 7, asked="before")
    worker = Instance("decode-0-x", Role.DECODE, "other", adapters=[RED, held])
    async with MemoryRegistry(MemoryServer()) as registry, RegistryView(registry) as view:
        await registry.put(keys.instance(worker), encode_record(worker))
        await registry.put(keys.card("other", worker.id), encode_record(card()))
        for kept in (BLUE, Adapter("unloaded", asked="now", model="other")):
            await registry.put(keys.adapter(kept), encode_record(kept), leased=False)
        await until(lambda: len(view.adapters("other")) == 2 and bool(view.cards() and view.instances()))
        store = AdapterStore(registry, view)
        with pytest.raises(error, match=r"choose another name|demo \(none is registered\) did not load"):
            async with store.claimed("demo", name):
                await store.load("demo", name, "/x")
        await until(lambda: view.loading("demo") == [])
