"""Models come and go with their cards."""

import asyncio
import gc
import json
import logging
import math
import shutil
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY

from pdserve.config.schema import AdmissionLimits
from pdserve.contract.messages import Load, WorkerLoad
from pdserve.contract.records import Instance, ModelCard, Role, encode_record
from pdserve.frontend.model import ModelContext
from pdserve.frontend.model.processor import Processor, Workers, serve_model
from pdserve.frontend.model.served_model import UNKNOWN_SECONDS
from pdserve.frontend.observability.metrics_page import MetricsPage
from pdserve.registry import keys
from pdserve.stream.archives import archive_name, pack_model
from tests.conditions import holds, until
from tests.frontend.conftest import MODEL, Graph, card, running_graph
from tests.frontend.model.echo import EchoWorker
from tests.frontend.observability.test_receipts import newest
from tests.frontend.sequence.test_moving import RED
from tests.frontend.test_generate import complete, completion
from tests.memory.registry import MemoryRegistry

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHORT_TIMEOUT = {"x-request-timeout": "0.2"}


async def names(graph: Graph) -> list[str]:
    answer = await graph.http.get("/v1/models")
    return [model["id"] for model in answer.json()["data"]]


async def test_two_models_at_once(graph: Graph) -> None:
    async with graph.worker("demo") as demo, graph.worker("org/other") as other:
        listed = await names(graph)
        first = await complete(graph, model="demo")
        second = await complete(graph, model="org/other")
        unnamed = await graph.http.post("/v1/completions", json={"prompt": [300], "max_tokens": 1})
        single = await graph.http.get("/v1/models/org/other")
        unknown = await graph.http.get("/v1/models/demonic")
        tables = await graph.http.get("/openapi.json")
        chosen = await graph.http.get("/openapi.json?model=demo")
        stored = await graph.http.get("/v1/responses/resp_1")
    assert listed == ["demo", "org/other"]
    assert (first.json()["model"], second.json()["model"]) == ("demo", "org/other")
    assert (len(demo.seen), len(other.seen)) == (1, 1)
    assert unnamed.status_code == 400
    assert "demo, org/other" in unnamed.json()["error"]["message"]
    assert single.json()["max_model_len"] == 4096
    assert unknown.status_code == 404
    assert (tables.status_code, chosen.status_code) == (400, 200)
    assert (stored.status_code, stored.json()["error"]["message"]) == (
        404,
        "Response with id 'resp_1' not found.",
    )


async def test_models_vanish_with_their_cards(graph: Graph) -> None:
    async with graph.worker("passing"):
        assert "passing" in await names(graph)
    await until(lambda: "passing" not in [card.name for card in graph.models.listed()])
    assert "passing" not in await names(graph)


async def test_other_models_are_served_beside_a_card_that_fails(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    warn = graph.models._warn_if_mixed

    def fail(name: str, cards: list[tuple[str, ModelCard]]) -> None:
        if name == "a-bad-card":
            raise KeyError("not expected")
        warn(name, cards)

    monkeypatch.setattr(graph.models, "_warn_if_mixed", fail)
    async with graph.worker("a-bad-card", connected=False), graph.worker("after-it"):
        assert "after-it" in await names(graph)


async def test_a_listed_model_is_ready(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its processor is being built a model is not listed, and its requests wait. Its number of usable workers is
    unknown (NaN), so that no alert says that it has none."""
    build = asyncio.Event()
    usable = partial(REGISTRY.get_sample_value, "pdserve_usable_workers", {"model": "slow", "role": "decode"})

    @asynccontextmanager
    async def slowly(card: ModelCard, context: ModelContext, workers: Workers) -> AsyncIterator[Processor]:
        await build.wait()
        async with serve_model(card, context, workers) as processor:
            yield processor

    monkeypatch.setattr("pdserve.frontend.model.processor.serve_model", slowly)
    async with graph.worker("slow", connected=False) as worker:
        await until(lambda: "slow" in [card.name for card in graph.models.known()])
        before = await names(graph)
        request = asyncio.create_task(complete(graph, model="slow"))
        await until(lambda: graph.models.report().waiting == 1)
        number, why = usable(), newest(graph).hops[-1].why
        build.set()
        await worker.until(lambda: worker.hello)
        after = await names(graph)
        answer = await request
        assert usable() == 1
    assert number is not None
    assert math.isnan(number)
    assert why == "this frontend loads the model's tokenizer"
    assert "slow" not in before
    assert "slow" in after
    assert answer.status_code == 200


async def test_a_new_frontend_waits_for_a_model_whose_card_changes_meanwhile(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, in a rolling upgrade, the old frontend would end before the new one can serve."""
    build = {"old": asyncio.Event(), "new": asyncio.Event()}

    @asynccontextmanager
    async def slowly(card: ModelCard, context: ModelContext, workers: Workers) -> AsyncIterator[Processor]:
        await build[card.fingerprint].wait()
        async with serve_model(card, context, workers) as processor:
            yield processor

    def known() -> list[str]:
        return [card.fingerprint for card in graph.models.known() if card.name == "rolling"]

    monkeypatch.setattr("pdserve.frontend.model.processor.serve_model", slowly)
    async with graph.worker("rolling", connected=False, loaded="old"):
        await until(lambda: known() == ["old"])
        old = graph.models._models["rolling"]
        settled = asyncio.create_task(graph.models.settled())
        async with graph.worker("rolling", connected=False, loaded="new", generation=1):
            await until(lambda: known() == ["new"])
            build["old"].set()
            await asyncio.wait_for(old.settled.wait(), 30)
            await holds(lambda: not settled.done())
            build["new"].set()
            await asyncio.wait_for(settled, 30)


async def test_a_removed_model_is_garbage_collected(graph: Graph) -> None:
    cores = []
    for number in range(3):
        async with serve_model(card(f"passing-{number}"), graph.models._context, list) as processor:
            cores.append(weakref.ref(processor.core))
        del processor
    gc.collect()
    assert sum(core() is not None for core in cores) <= 1  # something in vLLM remembers the newest one


async def test_the_load_that_a_frontend_publishes(graph: Graph) -> None:
    """The frontend's links say which decode workers are connected."""
    async with graph.worker(pace=None) as worker, MemoryRegistry(graph.registry) as registry:
        request = asyncio.create_task(complete(graph, max_tokens=1))
        await worker.until(lambda: worker.jobs)
        lost = msgspec.structs.replace(worker.instance, id="decode-9-lost", address="tcp://127.0.0.1:1")
        await registry.put(keys.instance(lost), encode_record(lost))
        up = {worker.id: True, lost.id: False}
        await until(lambda: {link.to: link.up for link in graph.models.links()} == up)
        await until(lambda: graph.models.report() == Load(running=1))
        await registry.delete(keys.instance(lost))
        await worker.step()
        assert (await request).status_code == 200
    await until(lambda: graph.models.report() == Load())


async def test_a_link_to_a_killed_worker_ends_when_another_worker_has_its_address(graph: Graph) -> None:
    """The link to a killed worker reconnects, because the worker's successor in the pod has the same address."""
    async with graph.worker() as successor, MemoryRegistry(graph.registry) as registry:
        killed = msgspec.structs.replace(successor.instance, id="decode-9-killed")
        await registry.put(keys.instance(killed), encode_record(killed))
        up = {successor.id: True, killed.id: True}
        await until(lambda: {link.to: link.up for link in graph.models.links()} == up)
        await registry.delete(keys.instance(killed))
        await until(lambda: [link.to for link in graph.models.links()] == [successor.id])
        assert (await complete(graph, max_tokens=1)).status_code == 200


async def test_requests_that_wait_for_a_slot_are_a_backlog_in_seconds(graph: Graph) -> None:
    def backlog() -> float | None:
        return REGISTRY.get_sample_value("pdserve_backlog_seconds", {"model": "queued", "role": "decode"})

    async with (
        graph.worker("queued", pace=None, at_once=2) as worker,
        graph.worker("queued", role=Role.PREFILL, connected=False, at_once=64),  # it may stand in
    ):
        asked = [asyncio.create_task(complete(graph, model="queued", max_tokens=1)) for _ in range(6)]
        await until(lambda: graph.models.report().waiting == 4)
        assert backlog() == graph.models.report().backlog == 4 * UNKNOWN_SECONDS / 2
        worker.go()
        await asyncio.gather(*asked)
    await until(lambda: backlog() in (0.0, None))
    assert graph.models.report().backlog == 0


async def test_a_worker_that_never_sends_its_archive_delays_no_model(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pdserve.frontend.model.processor.ASK_INTERVAL", 0.01)
    new = shutil.copytree(MODEL, tmp_path / "model") / "new.txt"
    new.write_text("no frontend has this folder")
    archive = pack_model(new.parent)
    record = encode_record(card("unsent", model="/elsewhere/model", blob=archive_name(archive)))
    async with EchoWorker("decode-9-silent", "unsent") as silent, MemoryRegistry(graph.registry) as registry:
        silent.archive_sent = asyncio.Event()
        await registry.put(keys.card("unsent", silent.id), record)
        await registry.put(keys.instance(silent.instance), encode_record(silent.instance))
        await silent.until(lambda: silent.archives_asked)
        async with graph.worker("beside"):
            assert "beside" in await names(graph)
        assert not graph.models._models["unsent"].settled.is_set(), "still waiting for the archive"
        async with graph.worker("unsent", archive=archive):
            answer = await complete(graph, model="unsent")
        assert silent.archives_asked == 1
    assert answer.status_code == 200


async def test_requests_wait_while_the_graph_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most `max-waiting` requests for the configured model wait, each until its deadline."""
    async with running_graph(tmp_path) as graph:
        monkeypatch.setattr(graph.models, "_limits", AdmissionLimits(max_waiting=3))
        unknown = await complete(graph, model="other")
        tokenizing = graph.http.post("/tokenize", json={"model": "demo", "prompt": "cat dog"})
        waiting = [asyncio.create_task(work) for work in (complete(graph), complete(graph), tokenizing)]
        await until(lambda: graph.models.load() == 2)
        late = await complete(graph, headers=SHORT_TIMEOUT)
        await until(lambda: graph.models.load() == 2)
        leaves = asyncio.create_task(complete(graph))
        await until(lambda: graph.models.load() == 3)
        refused = await complete(graph)
        assert (unknown.status_code, late.status_code, refused.status_code) == (404, 503, 429)
        assert late.headers["retry-after"] == "5"
        assert "no decode worker of demo came up" in late.json()["error"]["message"]
        leaves.cancel()
        await until(lambda: graph.models.load() == 2)
        async with graph.worker():
            assert {(await answer).status_code for answer in waiting} == {200}
        assert graph.models._starting is None


async def test_requests_for_a_kept_adapter_wait_while_the_graph_starts(tmp_path: Path) -> None:
    red = replace(RED, model="demo")
    async with running_graph(tmp_path) as graph, MemoryRegistry(graph.registry) as registry:
        await registry.put(keys.adapter(red), encode_record(red), leased=False)
        await until(lambda: bool(graph.context.view.adapters("demo")))
        request = asyncio.create_task(complete(graph, model="red"))
        await until(lambda: request.done() or graph.models.load() == 1)
        async with EchoWorker("decode-0-red") as worker:
            instance = replace(worker.instance, adapters=[RED])
            await registry.put(keys.card("demo", worker.id), encode_record(card()))
            await registry.put(keys.instance(instance), encode_record(instance))
            assert (await request).status_code == 200
            assert worker.requests[0].lora_request.lora_name == "red"
        await until(lambda: not newest(graph).running)
        first, second, *_ = newest(graph).hops
        assert (first.name, first.why) == ("admission", "no decode worker is available")
        assert (second.name, second.why) == ("admission", "this frontend loads the model's tokenizer")


async def test_a_long_body_waits_while_the_graph_starts(tmp_path: Path) -> None:
    """The model's bound on bodies is not known yet."""
    long = json.dumps(completion()).encode() + b" " * (4 << 20)
    async with running_graph(tmp_path) as graph:
        post = graph.http.post("/v1/completions", content=long, headers={"content-type": "application/json"})
        request = asyncio.create_task(post)
        await until(lambda: request.done() or graph.models.load() == 1)
        async with graph.worker():
            assert (await request).status_code == 200


async def test_health_says_what_is_missing(graph: Graph) -> None:
    async with graph.worker():
        await until(lambda: not graph.models.why_unserved())
        well = await graph.http.get("/health")
    await until(lambda: bool(graph.models.why_unserved()))
    ill = await graph.http.get("/health")
    assert well.status_code == 200
    assert well.json()["workers"]["demo"] == 1
    assert ill.status_code == 503
    assert "demo: no decode worker is connected" in ill.json()["missing"]


async def test_health_names_problems_from_the_registry_and_is_200(graph: Graph) -> None:
    async def told(*texts: str) -> bool:
        """Return whether the response names exactly these of `without`, `lost` and `gone`."""
        answer = await graph.http.get("/health")
        problems = "; ".join(answer.json().get("problems", []))
        assert answer.status_code == 200
        assert answer.json()["status"] == ("degraded" if problems else "ok")
        return {text for text in (without, lost, gone) if text in problems} == set(texts)

    without, lost, gone = "no prefill worker", "NATS does not answer prefill-7", "prefill-7 of h7 is gone"
    prefill = Instance("prefill-7-p", Role.PREFILL, "demo", host="h7")
    graph.context.view._lost.clear()  # lost workers of earlier tests would fill the list, which is bounded
    async with graph.worker() as worker, MemoryRegistry(graph.registry) as registry:

        async def put(instance: Instance) -> None:
            await registry.put(keys.instance(instance), encode_record(instance))

        await until(lambda: not graph.models.why_unserved())
        await put(replace(worker.instance, prefills_remotely=True))
        await until(lambda: told(without))
        await put(prefill)
        await until(told)
        await put(replace(prefill, queue_lost=True))
        await until(lambda: told(lost))
        await registry.delete(keys.instance(prefill))
        await until(lambda: told(without, gone))
        page = await MetricsPage(graph.context).get()
        assert b'pdserve_slot_ready{instance="frontend-0-test",host="h7",slot="prefill-7"} 0.0' in page
        await put(prefill)
        await until(told)


async def test_version(graph: Graph) -> None:
    answer = await graph.http.get("/version")
    assert set(answer.json()) == {"version", "vllm"}


async def test_routing_is_round_robin_and_can_be_changed(graph: Graph) -> None:
    """`least-loaded` also counts the load that workers report, which includes other frontends' requests."""
    async with graph.worker() as first, graph.worker() as second, MemoryRegistry(graph.registry) as registry:
        for _ in range(6):
            await complete(graph, max_tokens=1)
        assert (len(first.seen), len(second.seen)) == (3, 3)
        await registry.put(keys.setting("router"), b"least-loaded", leased=False)
        await until(lambda: graph.processor().workers.policy == "least-loaded")
        await first.send(WorkerLoad(Load(running=4, tokens=500)))
        try:
            for _ in range(6):
                await complete(graph, max_tokens=1)
            page = (await graph.http.get("/metrics")).text
        finally:
            await registry.delete(keys.setting("router"))
    assert 'policy="least-loaded"' in page
    assert (len(first.seen), len(second.seen)) == (3, 9)


async def test_parameters_that_need_an_engine_without_speculation_are_refused(graph: Graph) -> None:
    """vLLM's engine would ignore these parameters."""
    async with graph.worker("drafting", args={"speculative-config": {"method": "ngram"}}):
        plain = await complete(graph, model="drafting")
        refused = [
            await complete(graph, model="drafting", temperature=1, min_p=0.1),
            await complete(graph, model="drafting", logit_bias={"300": 5}),
        ]
    assert plain.status_code == 200
    assert [answer.status_code for answer in refused] == [400, 400]
    assert all("with speculative decoding" in answer.json()["error"]["message"] for answer in refused)


async def test_a_request_is_answered_once_if_building_its_model_fails_after_its_deadline(
    graph: Graph, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    broken = card("late", engine_args={"chat-template": "nowhere.jinja"})
    headers = {"x-request-timeout": "0.01", "x-request-id": "once"}
    async with MemoryRegistry(graph.registry) as registry:
        async with graph.models._context.building:
            await registry.put(keys.card("late", "decode-9-late"), encode_record(broken))
            await until(lambda: "late" in graph.models._models)
            answer = await graph.http.post(
                "/tokenize", json={"model": "late", "prompt": "hello"}, headers=headers
            )
        await until(lambda: any("code=504" in message for message in caplog.messages))
    assert answer.status_code == 504
    assert not [record for record in caplog.records if record.exc_info]
