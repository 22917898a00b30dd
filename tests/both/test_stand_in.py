"""The worker's side of stand-ins, with simulated engines. The frontend's side:
tests/frontend/model/test_stand_in.py."""

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdserve.both.stand_in import StandIn
from pdserve.config.schema import PrefillConfig
from pdserve.contract.records import Role, decode_instance, encode_record
from pdserve.plan.graph import GRAPH, service_of
from pdserve.plan.slots import Slot
from pdserve.registry import keys
from pdserve.stream.archives import archive_name, fetch
from pdserve.stream.tcp import TcpStreamClient
from pdserve.util.errors import EngineDead
from tests.conditions import holds, until
from tests.decode.graph import LONG, SHORT, Decoding, FrontendStream, WorkerGraph, config
from tests.memory.registry import MemoryRegistry, MemoryServer


async def start(graph: WorkerGraph, number: int = 0, args: Mapping[str, object] = {}) -> Decoding[StandIn]:
    """Start a registered prefill worker with these engine arguments, and connect a frontend to it."""
    graph.config = dataclasses.replace(graph.config, decode=None, prefill=PrefillConfig(engine_args=args))
    started = await graph.start_decoding(graph.make(StandIn, f"prefill-{number}"))
    key = "/t/" + keys.instance(started.worker._presence.instance)
    await until(lambda: key in graph.registry.data)
    return started


@pytest.fixture
async def stand_in(graph: WorkerGraph) -> Decoding[StandIn]:
    return await start(graph)


def worker_registry(graph: WorkerGraph) -> MemoryRegistry:
    assert isinstance(graph.decode._registry, MemoryRegistry)
    return graph.decode._registry


def card_in(server: MemoryServer, owner: str = "prefill-0") -> bytes | None:
    return server.data.get("/t/" + keys.card("demo", owner))


def standing_in(graph: WorkerGraph) -> set[str]:
    """The prefill workers that frontends may send requests to."""
    records = [value for key, value in graph.registry.data.items() if key.startswith("/t/instances/prefill/")]
    return {worker.id for worker in map(decode_instance, records) if worker.is_stand_in}


async def test_a_prefill_worker_stands_in_if_it_responds_like_decode_workers(
    graph: WorkerGraph, caplog: pytest.LogCaptureFixture
) -> None:
    """Without VllmWorker in the file, the loader cannot compare the arguments; the workers do."""
    await start(graph)
    await graph.prefill("prefill-1")
    await start(graph, 2, {"logprobs-mode": "raw_logits", "max-logprobs": 20, "max-num-seqs": 3})
    await until(lambda: "its logprobs-mode is not that of" in caplog.text)
    await until(lambda: standing_in(graph) == {"prefill-0"})
    assert card_in(graph.registry, "prefill-2") is None


@pytest.mark.parametrize(("logprobs", "names"), [(20, {"prefill-0", "prefill-1"}), (5, {"prefill-0"})])
async def test_without_a_decode_worker_a_stand_in_compares_with_another_stand_in(
    graph: WorkerGraph, caplog: pytest.LogCaptureFixture, logprobs: int, names: set[str]
) -> None:
    await start(graph)
    await until(lambda: standing_in(graph) == {"prefill-0"})
    await graph.registry.kill(worker_registry(graph))
    await start(graph, 1, {"max-logprobs": logprobs})
    await until(lambda: standing_in(graph) == names and (len(names) == 2 or "max-logprobs" in caplog.text))
    assert (card_in(graph.registry, "prefill-1") is None) is (len(names) == 1)


async def test_a_worker_stands_in_again_once_a_decode_worker_gives_equal_responses(
    graph: WorkerGraph,
) -> None:
    await start(graph)
    await until(lambda: standing_in(graph) == {"prefill-0"})
    card, instance = graph.decode._presence._card, graph.decode._presence.instance
    assert card is not None
    await graph.registry.kill(worker_registry(graph))
    for name, logprobs, standing in (("decode-1", 5, set()), ("decode-2", 20, {"prefill-0"})):
        theirs = replace(card, engine_args={"max-logprobs": logprobs})
        other, record = await graph.registry_of_another(), replace(instance, id=name)
        await other.put(keys.card("demo", name), encode_record(theirs))
        await other.put(keys.instance(record), encode_record(record))
        await until(lambda standing=standing: standing_in(graph) == standing)  # type: ignore[misc]
        await graph.registry.kill(other)


async def test_a_stand_in_sends_the_archive_to_a_new_frontend(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with WorkerGraph(model=str(tmp_path)) as graph:
        stand_in = await start(graph)
        async with TcpStreamClient(stand_in.frontend.client._address, "new") as client:
            assert archive_name(await fetch(client)) == graph.decode._archive.name


@pytest.mark.parametrize("stand_in", [True, False])
def test_the_file_turns_stand_ins_on_or_off(stand_in: bool) -> None:
    chosen = service_of(
        Slot(Role.PREFILL, 0), dataclasses.replace(config(), prefill=PrefillConfig(stand_in=stand_in))
    )
    assert (chosen == GRAPH[Role.PREFILL].service) is not stand_in


async def test_a_stand_in_decodes_and_still_prefills_for_others(
    stand_in: Decoding[StandIn], frontend: FrontendStream
) -> None:
    """A stopped stand-in finishes its requests."""
    for prompt in (SHORT, LONG):
        assert (await stand_in.frontend.ask(prompt, 20)).way == ("local", "stand-in")
    stream = await stand_in.frontend.stream()
    assert (await frontend.ask(LONG)).way == ("remote", "long")
    assert not stand_in.frontend.answered[stream].over
    await stand_in.frontend.cancel(stream)
    await stand_in.frees_all()
    stream = await stand_in.frontend.stream(max_tokens=200)
    stand_in.worker.stop()
    await asyncio.wait_for(stand_in.life, 10)
    assert not (await stand_in.frontend.end_of(stream)).failed


async def test_requests_of_a_stand_in_whose_engine_died_count_the_death(stand_in: Decoding[StandIn]) -> None:
    stream = await stand_in.frontend.stream()
    stand_in.engine.die()
    with pytest.raises(EngineDead):
        await stand_in.life
    failed = await stand_in.frontend.failure(stream)
    assert (failed.retry, failed.engines_died) == (True, 1)


async def test_no_card_exists_before_the_first_decode_worker(graph: WorkerGraph) -> None:
    """A starting graph is not ready before its decode workers are."""
    await graph.registry.kill(worker_registry(graph))
    await start(graph)
    await holds(lambda: card_in(graph.registry) is None)


async def test_a_stand_in_keeps_the_card_of_decode_workers_that_are_gone(graph: WorkerGraph) -> None:
    card = graph.decode._presence._card
    assert card is not None
    await start(graph)
    await until(lambda: card_in(graph.registry) == encode_record(card))
    await graph.registry.kill(worker_registry(graph))
    newer = replace(card, generation=7)
    other = await graph.registry_of_another()
    await other.put(keys.card("demo", "decode-1"), encode_record(newer))
    instance = replace(graph.decode._presence.instance, id="decode-1")
    await other.put(keys.instance(instance), encode_record(instance))
    await until(lambda: card_in(graph.registry) == encode_record(newer))
    await graph.registry.kill(other)
    await holds(lambda: card_in(graph.registry) == encode_record(newer))


async def test_a_stand_in_drops_its_card_while_all_decode_workers_have_other_weights(
    graph: WorkerGraph,
) -> None:
    """The decode worker with the same weights loses its lease and then returns."""
    await start(graph)
    await until(lambda: card_in(graph.registry) is not None)
    other, instance = await graph.registry_of_another(), graph.decode._presence.instance
    replaced = replace(instance, id="decode-1", fingerprint="other")
    await other.put(keys.instance(replaced), encode_record(replaced))
    worker = worker_registry(graph)
    await graph.registry.kill(worker)
    await until(lambda: card_in(graph.registry) is None)
    graph.registry.clients.append(worker)
    await graph.registry.notify()
    await until(lambda: card_in(graph.registry) is not None)
