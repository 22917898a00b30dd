"""An error about one request, message or connection costs that one: the process and all others go on."""

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

from pdserve import tasks
from pdserve.messages import Hello, Submit
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer
from tests.conditions import until
from tests.decode.graph import LONG, SHORT, FrontendStream, Prefill, WorkerGraph
from tests.engine.sims import expected

BAD = "bad"
"""id of the request at which something raises what nothing expects"""


def failing(work: Callable[..., Any], bad: Callable[..., bool]) -> Callable[..., Any]:
    """`work`, but it raises where `bad` of its arguments is true."""

    @wraps(work)
    def wrapped(*args: Any, **options: Any) -> Any:
        if bad(*args):
            raise KeyError("not expected")
        return work(*args, **options)

    return wrapped


@pytest.fixture(autouse=True)
def _fatal_if_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that fails as a whole is not started again within a test."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE", 600.0)


async def others_are_served(
    graph: WorkerGraph, frontend: FrontendStream, prefill: Prefill | None = None
) -> None:
    answered = await frontend.ask(SHORT)
    assert answered.tokens == expected(SHORT, 4)
    assert not graph.life.done()
    if prefill is not None:
        answered = await frontend.ask([7, *LONG])
        assert (answered.tokens, answered.way[0]) == (expected([7, *LONG], 4), "remote")
        assert not prefill.life.done()
    await until(graph.decode_engine.all_blocks_free)


async def test_a_submit_that_fails_is_tried_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    async with WorkerGraph() as graph:
        frontend, runner = await graph.frontend(), graph.decode._runner
        monkeypatch.setattr(
            runner, "submit", failing(runner.submit, lambda _, submit: submit.request_id == BAD)
        )
        await frontend.submit(SHORT, request_id=BAD)
        failed = (await frontend.end_of(BAD)).failed
        assert failed is not None
        assert failed.retry
        await others_are_served(graph, frontend)


@pytest.mark.parametrize("part", ["proof", "encoding"])
async def test_an_output_that_fails_ends_its_request_alone(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with WorkerGraph() as graph:
        frontend, runner, engine = await graph.frontend(), graph.decode._runner, graph.decode_engine
        beside = await frontend.submit(LONG[:20], 200)
        if part == "proof":
            prove = failing(runner._prove, lambda request, _: request.id == BAD)
            monkeypatch.setattr(runner, "_prove", prove)
        else:
            pack = failing(engine.pack, lambda outputs: any(each.request_id == BAD for each in outputs))
            monkeypatch.setattr(engine, "pack", pack)
        other = await graph.frontend("frontend-1")
        await other.submit(SHORT, 200, request_id=BAD)
        failed = (await other.end_of(BAD)).failed
        assert failed is not None
        assert failed.retry
        assert (await frontend.end_of(beside)).tokens == expected(LONG[:20], 200)
        await others_are_served(graph, other)


async def test_a_request_that_cannot_be_cancelled_at_its_deadline_keeps_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with WorkerGraph() as graph:
        frontend, engine = await graph.frontend(), graph.decode_engine
        engine.faults.slow = 1000.0
        cancel = engine.cancel
        monkeypatch.setattr(engine, "cancel", failing(cancel, lambda ids: BAD in ids))
        await frontend.submit(SHORT, 200, 0.1, BAD)
        late = await frontend.submit(LONG[:20], 200, 0.1)
        await frontend.end_of(late)
        engine.faults.slow = 1.0
        await cancel([BAD])
        await others_are_served(graph, frontend)


async def test_a_prompt_that_a_prefill_worker_cannot_begin_is_no_ones_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unanswered it would be delivered again, to one prefill worker after the other."""
    async with WorkerGraph() as graph:
        prefill, frontend = await graph.prefill(), await graph.frontend()
        begin = failing(prefill.engine.prefill, lambda _, prompt, *rest: prompt == LONG)
        monkeypatch.setattr(prefill.engine, "prefill", begin)
        answered = await frontend.ask(LONG)
        assert (answered.tokens, answered.way[0]) == (expected(LONG, 4), "local")
        await others_are_served(graph, frontend, prefill)


async def test_an_answer_that_cannot_be_taken_costs_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with WorkerGraph() as graph:
        prefill, frontend = await graph.prefill(), await graph.frontend()
        reader = graph.decode._answers
        started = failing(reader._started, lambda request, _: request.id == BAD)
        monkeypatch.setattr(reader, "_started", started)
        await frontend.submit(LONG, request_id=BAD)
        assert (await frontend.end_of(BAD)).tokens == expected(LONG, 4)
        await others_are_served(graph, frontend, prefill)


async def test_a_frontend_that_cannot_be_told_the_load_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with WorkerGraph() as graph:
        version = graph.decode_engine.facts.vllm_version
        told = await graph.frontend("told")
        send = graph.stream.send
        monkeypatch.setattr(graph.stream, "send", failing(send, lambda name, _: name == BAD))
        for frontend in (await graph.frontend(BAD), told):
            await frontend.client.send(Hello(version, follow_load=True))
        await until(lambda: len(told.loads) == 1)
        await told.submit(SHORT, 5000)
        await until(lambda: len(told.loads) > 1)
        assert not graph.life.done()


async def test_a_connection_that_cannot_beat_is_cut_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        TcpStreamServer("127.0.0.1", silence=30.0) as server,
        TcpStreamClient(server.address, BAD) as bad,
        TcpStreamClient(server.address, "good", silence=1.6) as good,
    ):
        await until(lambda: len(server._frontends) == 2)
        connection = server._frontends[BAD]
        monkeypatch.setattr(connection, "beat", failing(connection.beat, lambda _: True))
        ended = asyncio.ensure_future(anext(bad.received()))
        await asyncio.wait([ended], timeout=30)
        assert ended.exception() is not None
        assert list(server._frontends) == ["good"]
        await good.send(Submit("r", [1], 1.0, []))
        received = server.received()
        async with asyncio.timeout(30):
            while (await anext(received))[0] != "good":
                pass
