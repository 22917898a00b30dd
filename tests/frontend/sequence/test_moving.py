"""A decode worker is lost: its requests continue at another worker, and clients see nothing but a pause."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from pdserve.contract.messages import Failed, Outputs, Refused
from pdserve.contract.records import Adapter, encode_record
from pdserve.registry import keys
from tests.conditions import holds, until
from tests.engine.sims import expected as of_engine
from tests.frontend.conftest import Graph
from tests.frontend.model.echo import EchoWorker, continuation
from tests.frontend.model.sims import sim_engines
from tests.frontend.test_generate import PROMPT, chat, complete, completion, delta, events, text_of
from tests.memory.registry import MemoryRegistry

pytestmark = pytest.mark.asyncio(loop_scope="session")


def post(graph: Graph, **changes: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(complete(graph, **changes))


async def steps(worker: EchoWorker, count: int) -> None:
    await worker.until(lambda: worker.jobs)
    for _ in range(count):
        await worker.step()


async def moved(
    graph: Graph, generated: int, shift: int = 0, **changes: Any
) -> tuple[EchoWorker, EchoWorker, httpx.Response]:
    """Return a worker that died after `generated` tokens, the next worker of the request, and the response. With
    `shift`, the second worker generates other tokens."""
    async with graph.worker(pace=None) as first:
        request = post(graph, **changes)
        await first.until(lambda: len(first.jobs) == changes.get("n", 1))
        for _ in range(generated):
            await first.step()
        async with graph.worker(shift=shift) as second:
            await first.die()
            answer = await request
            if shift:
                await second.until(lambda: second.cancelled)
    return first, second, answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("generated", "large"), [(0, 1 << 16), (1, 1 << 16), (5, 1 << 16), (1, 0)])
async def test_the_text_is_the_same_after_a_migration(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, stream: bool, generated: int, large: int
) -> None:
    """With `large` 0, the request counts as large, and another event loop answers it."""
    monkeypatch.setattr("pdserve.frontend.edge.body.LARGE", large)
    first, second, answer = await moved(graph, generated, max_tokens=12, min_tokens=4, stream=stream)
    assert answer.status_code == 200
    expected = await text_of(graph, continuation(PROMPT, 12))
    if stream:
        assert "".join(map(delta, events(answer))) == expected
    else:
        assert answer.json()["choices"][0]["text"] == expected
        assert answer.json()["usage"]["completion_tokens"] == 12
        assert answer.json()["usage"]["prompt_tokens"] == len(PROMPT)
        assert answer.headers["x-pdserve-instance"] == f"{first.id},{second.id}"
    (submit,) = second.seen
    assert submit.prompt == PROMPT + continuation(PROMPT, generated)
    params = second.requests[0].sampling_params
    assert (params.max_tokens, params.min_tokens) == (12 - generated, max(0, 4 - generated))
    assert submit.request_id != first.seen[0].request_id


async def test_logprobs_and_several_outputs_migrate(graph: Graph) -> None:
    first, second, answer = await moved(graph, 3, n=2, temperature=1.0, seed=3, logprobs=1)
    for choice in answer.json()["choices"]:
        assert len(choice["logprobs"]["token_logprobs"]) == 8
    before, after = ({each.sampling_params.seed for each in worker.requests} for worker in (first, second))
    assert len(after) == 2
    assert not before & after


STATEFUL = [
    ({"presence_penalty": 0.5}, 0),
    ({"presence_penalty": 0.5}, 3),
    ({"frequency_penalty": 0.5, "temperature": 0.9}, 3),
    ({"structured_outputs": {"regex": "[a-z ]+"}, "seed": 7}, 3),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("changes", "generated"), STATEFUL)
async def test_a_request_with_stateful_sampling_is_replayed(
    graph: Graph, changes: dict[str, Any], generated: int, stream: bool
) -> None:
    async with graph.worker(pace=None) as first:
        request = post(graph, **changes, stream=stream, max_tokens=9, logprobs=1)
        await steps(first, generated)
        async with graph.worker(pace=None) as second:
            await first.die()
            await steps(second, 2)  # then the request is lost again, possibly during the replay
            async with graph.worker() as third:
                await second.die()
                answer = await request
                expected = await text_of(graph, continuation(PROMPT, 9))
    assert answer.status_code == 200
    choices = [event["choices"][0] for event in events(answer)] if stream else [answer.json()["choices"][0]]
    assert "".join(choice["text"] for choice in choices) == expected
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"]) == 9
    assert [submit.prompt for submit in (*second.seen, *third.seen)] == [PROMPT, PROMPT]
    assert third.requests[0].sampling_params.max_tokens == 9
    seeds = {worker.requests[0].sampling_params.seed for worker in (first, second, third)}
    assert len(seeds) == 1


@pytest.mark.parametrize("generated", [1, 3])
async def test_a_replay_with_other_tokens_fails_cleanly(graph: Graph, generated: int) -> None:
    _, second, answer = await moved(graph, generated, shift=1, presence_penalty=0.5)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "generated other tokens" in answer.json()["error"]["message"]
    assert second.cancelled == [second.seen[0].request_id]


async def test_a_request_at_a_draining_worker_goes_to_another(graph: Graph) -> None:
    async with graph.worker() as first, graph.worker() as second:
        for worker in (first, second):
            worker.fail = Failed("", f"{worker.id} is draining", retry=True)
        request = post(graph)
        await first.until(lambda: first.seen)
        await second.until(lambda: second.seen)
        first.fail = None
        answer = await request
    assert answer.status_code == 200
    assert len(second.seen) == 1


async def test_a_request_ends_when_four_workers_have_lost_it(graph: Graph) -> None:
    """A killed process does not report its engine's death. Two such reports would end the request."""
    request = post(graph)
    for _ in range(4):
        async with graph.worker(pace=None) as worker:
            await steps(worker, 1)
    answer = await request
    assert answer.status_code == 503
    assert "4 decode workers lost this request" in answer.json()["error"]["message"]


async def test_a_request_at_which_two_engines_died_is_not_tried_again(graph: Graph) -> None:
    """The client is told not to retry. (`poison` in the chaos tests covers other requests of such engines.)"""
    async with graph.worker() as worker, graph.worker() as other:
        worker.fail = other.fail = Failed("", "its engine died", retry=True, engines_died=2)
        answer = await complete(graph)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert "2 engines in a row died" in answer.json()["error"]["message"]
    assert len(worker.seen) + len(other.seen) == 1


async def test_a_request_whose_outputs_cannot_be_read_migrates(graph: Graph) -> None:
    async with graph.worker(pace=None) as first:
        request = post(graph)
        await steps(first, 1)
        async with graph.worker() as second:
            await first.send(Outputs([b"\xc1 no msgpack"]))
            answer = await request
            expected = await text_of(graph, continuation(PROMPT, 8))
    assert answer.json()["choices"][0]["text"] == expected
    assert first.cancelled == [first.seen[0].request_id]
    assert second.seen[0].prompt == PROMPT + continuation(PROMPT, 1)


async def test_a_dead_workers_last_messages_are_read(graph: Graph) -> None:
    """Such messages may say which requests the engine was computing. While they are read, cancelling a request's other
    sequence fails, because the worker is dead."""
    async with graph.worker(pace=None) as worker:
        asked = [post(graph, n=2, temperature=1.0) for _ in range(30)]
        await worker.until(lambda: len(worker.jobs) == 60)
        for submit in worker.seen:
            await worker.send(Failed(submit.request_id, "no more", invalid=True))
        await worker.die()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {400}


async def test_a_worker_that_refused_gets_no_more_requests(graph: Graph) -> None:
    async with graph.worker() as first, graph.worker() as second:
        await until(lambda: graph.models.usable_workers().get("demo") == 2)
        await first.send(Refused("another vLLM"))
        await until(lambda: graph.models.usable_workers().get("demo") == 1)
        for _ in range(4):
            assert (await complete(graph)).status_code == 200
    assert not first.seen
    assert len(second.seen) == 4


async def test_a_lost_request_waits_for_a_worker(graph: Graph) -> None:
    async with graph.worker(pace=None) as first:
        request = post(graph, max_tokens=6)
        await steps(first, 2)
    fresh = post(graph, max_tokens=6)
    await holds(lambda: not request.done() and not fresh.done())
    async with graph.worker():
        expected = await text_of(graph, continuation(PROMPT, 6))
        for answer in (await request, await fresh):
            assert answer.json()["choices"][0]["text"] == expected


async def test_a_worker_whose_lease_comes_back_ends_the_wait(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old connection to this worker stayed up, so no event of a connection ends the wait."""
    monkeypatch.setattr("pdserve.frontend.sequence.migration.RETRY_DELAY", 0.01)
    async with EchoWorker("decode-0-away") as away, MemoryRegistry(graph.registry) as registry:
        async with graph.worker(pace=None) as first:
            await registry.put(keys.instance(away.instance), encode_record(away.instance))
            await away.until(lambda: away.hello)
            await registry.delete(keys.instance(away.instance))
            await until(lambda: graph.models.usable_workers().get("demo") == 1)
            request = post(graph, max_tokens=6)
            await steps(first, 2)
        await until(lambda: graph.models.usable_workers().get("demo") == 0)
        await holds(lambda: not request.done())  # this takes longer than RETRY_DELAY: no retry ends the wait
        await registry.put(keys.instance(away.instance), encode_record(away.instance))
        assert (await asyncio.wait_for(request, 5)).status_code == 200


RED = Adapter("red", "/red", 5)


async def test_a_beam_search_leaves_no_task_when_a_beam_fails(graph: Graph) -> None:
    """vLLM has a task for each beam. When one fails, vLLM does not end the others."""
    async with graph.worker(pace=None, at_once=1) as worker:
        core = graph.processor().core
        fields = completion(use_beam_search=True, n=4, max_tokens=6)
        asked = graph.http.post("/v1/completions", json=fields, headers={"x-request-timeout": "2"})
        request = asyncio.create_task(asked)
        await steps(worker, 1)
        await worker.until(lambda: len(worker.seen) == 2)
        await worker.send(Failed(worker.seen[1].request_id, "refused", invalid=True))
        assert (await request).status_code == 400
        worker.go()  # the beam that got the failed beam's slot needs steps
        await asyncio.wait_for(core.idle(), 5)
        await until(lambda: not [task for task in asyncio.all_tasks() if "collect_from" in repr(task)])


async def test_a_beam_search_counts_its_prompt_once_and_does_not_change_the_estimate(
    graph: Graph, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM makes a request for each token of a beam, each with a longer prompt."""
    caplog.set_level("INFO")
    async with graph.worker():
        await complete(graph, max_tokens=60)
        learnt = copy(graph.processor().core.estimate)
        await complete(graph, use_beam_search=True, n=4, max_tokens=5)
        assert graph.processor().core.estimate == learnt
        await until(lambda: "tokens=4+17 " in caplog.text)


@asynccontextmanager
async def having(graph: Graph, worker: EchoWorker, *adapters: Adapter) -> AsyncIterator[None]:
    """While entered, the worker's record says that it has these adapters."""
    async with MemoryRegistry(graph.registry) as registry:
        instance = replace(worker.instance, adapters=list(adapters))
        await registry.put(keys.instance(instance), encode_record(instance))
        yield


async def test_a_request_continues_once_another_worker_loads_its_adapter(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.frontend.sequence.migration.RETRY_DELAY", 0.01)
    async with graph.worker(pace=None) as first, graph.worker() as second, having(graph, first, RED):
        await until(lambda: "red" in graph.models.find("demo").adapters)
        request = post(graph, model="red")
        await steps(first, 1)
        await first.die()
        await holds(lambda: not request.done())  # this takes longer than RETRY_DELAY
        async with having(graph, second, RED):
            assert (await asyncio.wait_for(request, 5)).status_code == 200


async def test_a_request_whose_unloaded_adapter_is_at_no_worker_fails_at_once(graph: Graph) -> None:
    """The engine has dropped the adapter, as engines may do to load another one."""
    async with graph.worker(pace=None) as worker, MemoryRegistry(graph.registry) as registry:
        async with having(graph, worker, RED):
            await until(lambda: "red" in graph.models.find("demo").adapters)
            request = post(graph, model="red")
            await worker.until(lambda: worker.jobs)
            unloaded = Adapter("red", asked="later", model="demo")
            await registry.put(keys.adapter(unloaded), encode_record(unloaded))
            await worker.send(Failed(worker.seen[0].request_id, "adapter 5 is not here", retry=True))
            await holds(lambda: not request.done())  # a worker's record still has the adapter
        answer = await asyncio.wait_for(request, 5)
    assert (answer.status_code, answer.json()["error"]["message"][:31]) == (
        400,
        "The lora adapter 'red' was unlo",
    )


async def test_a_request_without_a_worker_gets_a_503_at_its_deadline(graph: Graph) -> None:
    async with graph.worker():
        pass
    prompts: dict[str, dict[str, object]] = {
        "completions": completion(),
        "chat/completions": chat(),
        "responses": {"input": "hello"},
    }
    asked = [
        graph.http.post(
            f"/v1/{path}",
            json={"model": "demo", "stream": stream, **body},
            headers={"x-request-timeout": "0.2"},
        )
        for path, body in prompts.items()
        for stream in (False, True)
    ]
    for answer in await asyncio.gather(*asked):
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "no decode worker of demo" in answer.json()["error"]["message"]


@pytest.mark.parametrize("killed", [True, False])
async def test_killed_engines_do_not_count_against_a_request(graph: Graph, killed: bool) -> None:
    """The kernel may kill engines for lack of memory. Engines that crash do count."""
    async with sim_engines(graph, 3, 0) as engines:
        for engine in engines:
            engine.faults.going.clear()
        prompt, left = list(range(400, 420)), list(engines)
        asking = asyncio.create_task(complete(graph, prompt=prompt, max_tokens=20))
        for _ in range(2):
            await until(lambda: any(engine.usage.running for engine in left))
            dies = next(engine for engine in left if engine.usage.running)
            left.remove(dies)
            dies.die(killed=killed)
        left[0].faults.going.set()
        answer = await asking
        text = await text_of(graph, of_engine(prompt, 20))
    assert answer.status_code == (200 if killed else 500), answer.text
    assert not killed or answer.json()["choices"][0]["text"] == text


async def test_after_an_engines_death_the_next_worker_prefills_locally(graph: Graph) -> None:
    """The KV that the dead engine read may have killed it."""
    async with sim_engines(graph, 3, 1) as engines:
        for engine in engines[:3]:
            engine.faults.fatal_pulls = True
        prompt = list(range(400, 600))
        answer = await complete(graph, prompt=prompt, max_tokens=20)
        dead = sum(engine.faults.dead for engine in engines)
        text = await text_of(graph, of_engine(prompt, 20))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == text
    assert dead == 1
