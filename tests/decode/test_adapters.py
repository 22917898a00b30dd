"""LoRA adapters of workers, from the file or loaded at run time. No request reads another adapter's KV."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from pdserve.config.schema import DecodeConfig, PrefillConfig
from pdserve.contract.messages import Submit
from pdserve.contract.records import Adapter, Instance, Role, encode_record
from pdserve.decode.worker import DecodeWorker
from pdserve.engine.lora import adapter_id, with_adapter
from pdserve.engine.sim.engine import SimEngine
from pdserve.engine.sim.wire import CoreRequest, Lora, Sampling
from pdserve.frontend.vllm.lora_adapters import AdapterStore, servable_adapters
from pdserve.prefill.worker import PrefillWorker
from pdserve.process.worker_adapters import WorkerAdapters
from pdserve.registry import keys
from pdserve.registry.view import RegistryView
from pdserve.util.errors import ConfigError, EngineDead, ProtocolError
from tests.conditions import until
from tests.decode.graph import LONG, Answered, Seams, W, config, sees
from tests.engine.sims import LOADED, adapter_in, collect, generated, sim, spec, tokens
from tests.memory.registry import MemoryRegistry, MemoryServer

LORA: dict[str, object] = {"enable-lora": True, "max-loras": 2}
RED, BLUE = 7, 8


def body(adapter: int, max_tokens: int = 4) -> list[bytes]:
    lora = Lora(f"of-{adapter}", adapter, "/p") if adapter else None
    return [msgspec.msgpack.encode(CoreRequest("", None, None, Sampling(max_tokens), lora_request=lora))]


@pytest.mark.parametrize("asked", [0, RED, BLUE])
@pytest.mark.parametrize("computed", [0, RED, BLUE])
async def test_kv_of_an_adapter_is_read_by_its_own_requests_alone(computed: int, asked: int) -> None:
    async with sim(Role.PREFILL, "p", **LORA) as prefill, sim(Role.DECODE, "d", **LORA) as decode:
        for engine in (prefill, decode):
            await engine.load_adapter(RED, "/red")
            await engine.load_adapter(BLUE, "/blue")
        await prefill.prefill("r", LONG, body(computed))
        handle = (await collect(prefill, "r"))[-1].handle
        assert handle is not None
        assert handle.fingerprint == with_adapter(LOADED, computed) == decode.kv_fingerprint(body(computed))
        if computed == asked:
            await decode.generate("r", LONG, body(asked), handle)
            assert tokens(await collect(decode, "r")) == generated(LONG, 4, asked)
        else:
            with pytest.raises(ProtocolError, match="KV of other weights"):
                await decode.generate("r", LONG, body(asked), handle)


def test_an_adapter_id_depends_on_its_files_and_arguments(tmp_path: Path) -> None:
    red, blue = adapter_in(tmp_path, "red"), adapter_in(tmp_path, "blue")
    (red / "a.safetensors").write_bytes(b"not read")
    weights = red / "adapter_model.bin"
    weights.write_bytes(bytes(8 << 20))
    first = adapter_id(str(red), {})
    assert first == adapter_id(str(red), {"enable-lora": True, "enable-moe-shared-loras": False})
    others = [
        adapter_id(str(blue), {}),
        adapter_id(str(red), {"lora-dtype": "float16"}),
        adapter_id(str(red), {"lora-target-modules": ["q_proj"]}),
        adapter_id(str(red), {"enable-moe-shared-loras": True}),
    ]
    with weights.open("r+b") as file:
        file.seek(5_000_001)
        file.write(b"1")
    others.append(adapter_id(str(red), {}))
    (red / "adapter_model.safetensors").write_bytes((8).to_bytes(8, "little") + b"not json" * (1 << 20))
    others.append(adapter_id(str(red), {}))
    (red / "adapter_config.json").write_text("{}")
    others.append(adapter_id(str(red), {}))
    assert len({first, *others}) == 8


# ── workers ──


class LoraGraph(Seams):
    """A decode and a prefill worker with room for two adapters each, and a frontend's adapter store."""

    def __init__(self) -> None:
        decode = DecodeConfig(remote_prefill=True, max_local_prefill_length=32, engine_args=LORA)
        super().__init__(replace(config(decode), prefill=PrefillConfig(engine_args=LORA)))

    async def __aenter__(self) -> Self:
        self.prefill = await self.start(self.worker(PrefillWorker, "prefill-0"))
        self.decode = await self.start_decoding(self.worker(DecodeWorker, "decode-0"))
        registry = await self.registry_of_another()
        self.view = await self.enter_async_context(RegistryView(registry))
        self.store = AdapterStore(registry, self.view)
        await until(lambda: len(self.view.instances(model="demo")) == 2)
        await until(lambda: sees(self.decode.worker, "prefill-0"))
        return self

    def worker(self, kind: type[W], name: str, **more: object) -> W:
        return self.make(kind, name, SimEngine(spec(kind.work, name, **{**LORA, **more})))

    def names(self) -> dict[str, Adapter]:
        return servable_adapters(self.view.adapters("demo"), self.view.instances(model="demo"))

    async def load(self, name: str, path: str) -> None:
        async with self.store.claimed("demo", name):
            await self.store.load("demo", name, path)

    async def ask(self, adapter: int) -> Answered:
        frontend = self.decode.frontend
        name = f"r{len(frontend.answered)}"
        answered = frontend.answered[name] = Answered(LONG, 4)
        await frontend.client.send(Submit(name, LONG, 30.0, body(adapter)))
        await until(lambda: answered.over)
        return answered


async def test_a_worker_does_not_start_with_an_adapter_that_is_not_there() -> None:
    async with MemoryRegistry(MemoryServer(), "t") as registry, sim(Role.DECODE, "d", **LORA) as engine:
        adapters = WorkerAdapters(engine, {"lora-modules": ["red=/nowhere"]}, "demo", registry)
        with pytest.raises(ConfigError, match="Loading lora red failed: No adapter found for /nowhere"):
            await adapters.start()


async def test_an_adapter_is_loaded_by_all_workers_and_by_those_that_come_later(tmp_path: Path) -> None:
    """A name that is loaded again with other files is another adapter."""
    async with LoraGraph() as graph:
        path = adapter_in(tmp_path, "red")
        await graph.load("red", str(path))
        red = graph.names()["red"]
        assert all(worker.has_adapter(red.id) for worker in graph.view.instances(model="demo"))
        answered = await graph.ask(red.id)
        assert (answered.way[0], answered.tokens) == ("remote", generated(LONG, 4, red.id))
        await graph.start(graph.worker(PrefillWorker, "prefill-1"))
        await until(lambda: len(graph.view.instances(Role.PREFILL)) == 2)
        assert all(worker.has_adapter(red.id) for worker in graph.view.instances(Role.PREFILL))
        await graph.store.unload("demo", "red")
        (path / "adapter_config.json").write_text("{}")
        await graph.load("red", str(path))
        second = graph.names()["red"]
        assert second.id != red.id
        answered = await graph.ask(second.id)
        assert answered.tokens == generated(LONG, 4, second.id)
        assert answered.placed is not None
        assert answered.placed.cached == 0


@pytest.mark.parametrize("what", ["full", "not enabled", "another dtype"])
async def test_an_adapter_is_on_all_workers_or_on_none(tmp_path: Path, what: str) -> None:
    async with LoraGraph() as graph:
        if what == "full":
            problem = r"all adapter slots are in use \(max-cpu-loras: 2\): unload one first"
            for name in ("one", "two"):
                await graph.load(name, str(adapter_in(tmp_path, name)))
        elif what == "not enabled":
            problem = "prefill-1 runs without enable-lora"
            engine = SimEngine(spec(Role.PREFILL, "prefill-1"))
            await graph.start(graph.make(PrefillWorker, "prefill-1", engine))
            await until(lambda: len(graph.view.instances(Role.PREFILL)) == 2)
        else:
            problem = "differ between the hosts of"
            await graph.start(graph.worker(PrefillWorker, "prefill-1", **{"lora-dtype": "float16"}))
            graph.config = replace(graph.config, prefill=PrefillConfig(engine_args={"lora-dtype": "float16"}))
            await graph.start(graph.worker(PrefillWorker, "prefill-2"))
            await until(lambda: len(graph.view.instances(Role.PREFILL)) == 3)
        before = graph.names()
        with pytest.raises(ConfigError, match=problem):
            await graph.load("red", str(adapter_in(tmp_path, "red")))
        assert graph.names() == before
        assert graph.view.adapters("demo").keys() == before.keys()
        await until(lambda: not graph.view.loading("demo"))


async def test_a_request_whose_adapter_is_not_loaded_may_be_retried_elsewhere() -> None:
    async with LoraGraph() as graph:
        failed = (await graph.ask(RED)).failed
        assert failed is not None
        assert failed.retry


async def test_kv_of_a_request_whose_adapter_is_unloaded_meanwhile_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LoraGraph() as graph:
        await graph.load("red", str(adapter_in(tmp_path, "red")))
        red, engine = graph.names()["red"].id, graph.decode.engine
        generate = engine.generate

        async def too_late(*asked: Any) -> None:
            await engine.unload_adapter(red)
            await generate(*asked)

        monkeypatch.setattr(engine, "generate", too_late)
        failed = (await graph.ask(red)).failed
        assert failed is not None
        assert failed.retry
        await until(graph.prefill.engine.all_blocks_free, within=1.0)


# ── one worker without a graph ──


class Refusing(SimEngine):
    problem: Exception | None = None

    async def load_adapter(self, id: int, folder: str) -> None:
        if self.problem is not None:
            raise self.problem
        await super().load_adapter(id, folder)


class Alone:
    def __init__(self, engine: Refusing, path: Path) -> None:
        self.engine = engine
        self.adapters = WorkerAdapters(engine, {}, "demo", MemoryRegistry(MemoryServer(), "t"))
        self.path = str(adapter_in(path, "red"))

    async def have(self, *calls: str, path: str = "", id: int = 0) -> list[Adapter]:
        """Load the adapter `red` for each of these load calls; return the list for the worker's record."""
        wanted = {("red", call): Adapter("red", path or self.path, id, call) for call in calls}
        await self.adapters._load(wanted)
        assert self.adapters.listed is not None
        return self.adapters.listed


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Alone]:
    async with Refusing(spec(Role.DECODE, "d", **LORA)) as engine:
        yield Alone(engine, tmp_path)


@pytest.mark.parametrize(
    ("raised", "path", "problem"),
    [
        (AssertionError(), "", "AssertionError()"),
        (RuntimeError("x" * 9999), "", "x" * 500),
        (None, "~nosuchuser/x", "Loading lora red failed: No adapter found for ~nosuchuser/x"),
    ],
)
async def test_any_failure_becomes_a_short_problem_of_its_adapter(
    alone: Alone, raised: Exception | None, path: str, problem: str
) -> None:
    alone.engine.problem = raised
    (red,) = await alone.have("a", path=path)
    assert (red.problem, red.id) == (problem, 0)


async def test_a_dead_engine_ends_its_worker(alone: Alone) -> None:
    alone.engine.problem = EngineDead("boom")
    with pytest.raises(EngineDead):
        await alone.have("a")


async def test_a_record_has_one_entry_for_an_adapter_that_comes_and_goes(alone: Alone) -> None:
    for call in "abcd":
        assert ("red", call) in [(each.name, each.asked) for each in await alone.have(call)]
        assert len(await alone.have()) == 1
    assert len(await alone.have("e", "f")) == 2


async def test_an_adapter_of_the_graph_that_failed_to_load_is_tried_again(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = adapter_id(alone.path, {})
    alone.engine.problem = OSError("the disk is unmounted")
    assert (await alone.have("a", id=id))[0].problem
    alone.engine.problem = None
    assert (await alone.have("a", id=id))[0].problem
    monkeypatch.setattr("pdserve.process.worker_adapters.RETRY_AFTER", 0.0)
    # without an id: the first load, whose client already has the error
    assert (await alone.have("a"))[0].problem
    assert (await alone.have("a", id=id))[0].id == id


async def test_a_list_of_adapters_that_could_not_be_reported_is_reported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.process.worker_adapters.RETRY_AFTER", 0.05)
    said: list[list[Adapter] | None] = []

    async def changed(there: list[Adapter] | None) -> None:
        said.append(there)
        if len(said) == 1:
            raise RuntimeError("etcd")

    async with MemoryRegistry(MemoryServer(), "t") as registry, sim(Role.DECODE, "d", **LORA) as engine:
        red = Adapter("red", str(adapter_in(tmp_path, "red")), asked="a", model="demo")
        adapters = WorkerAdapters(engine, {}, "demo", registry)
        await adapters.start()
        await registry.put(keys.loading(red), encode_record(red))
        with pytest.raises(RuntimeError, match="etcd"):
            await adapters.follow(changed)
        following = asyncio.create_task(adapters.follow(changed))
        await until(lambda: len(said) == 2)
        following.cancel()
    assert said[0] == said[1] == adapters.listed


def test_names_that_frontends_serve() -> None:
    red, other = Adapter("red", "/red", 1), Adapter("red", "/red", 2)
    workers = [Instance(f"d-{n}", Role.DECODE, adapters=[each]) for n, each in enumerate((red, other, red))]
    assert servable_adapters({}, workers) == {"red": red}
    assert servable_adapters({}, [Instance("d", Role.DECODE), *workers[1:2]]) == {"red": other}
    assert servable_adapters({"red": Adapter("red", asked="a")}, workers) == {}
    late = Adapter("red", "/new", 3, asked="a")
    assert servable_adapters({"red": late}, [*workers, Instance("e", Role.DECODE, adapters=[red, late])]) == {
        "red": late
    }
    assert (
        servable_adapters({}, [Instance("d", Role.DECODE, adapters=[Adapter("x", "/x", problem="no")])]) == {}
    )
