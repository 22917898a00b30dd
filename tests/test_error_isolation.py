"""An error about one request, message or connection fails only that one."""

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.contract.messages import Hello
from pdserve.runtime import tasks
from tests.conditions import until
from tests.decode.graph import LONG, SHORT, FrontendStream, Prefill, WorkerGraph
from tests.engine.sims import expected

BAD = "bad"
"""id of the request for which a method raises an unexpected error"""


def failing(work: Callable[..., Any], bad: Callable[..., bool]) -> Callable[..., Any]:
    """Return `work`, wrapped to raise KeyError for arguments for which `bad` is true."""

    @wraps(work)
    def wrapped(*args: Any, **options: Any) -> Any:
        if bad(*args):
            raise KeyError("not expected")
        return work(*args, **options)

    return wrapped


@pytest.fixture(autouse=True)
def _fatal_if_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that fails as a whole does not restart within a test."""
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


@pytest.mark.parametrize(
    ("part", "method", "bad", "prompt"),
    [
        ("decode._runner", "submit", lambda _, submit: submit.request_id == BAD, SHORT),
        ("decode._runner", "_first_step", lambda request, _: request.id == BAD, SHORT),
        ("decode_engine", "pack", lambda outputs: any(each.request_id == BAD for each in outputs), SHORT),
        ("prefill_engine", "prefill", lambda _, prompt, *rest: prompt == LONG, LONG),
        ("decode._answers", "_started", lambda request, _: request.id == BAD, LONG),
    ],
    ids=["submit", "first token", "encoding", "prefill", "answer of a prefill worker"],
)
async def test_an_error_fails_only_its_request(
    part: str, method: str, bad: Callable[..., bool], prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed request with a local prefill may be retried at another worker. After a failed remote prefill, the decode
    worker computes the prompt."""
    async with WorkerGraph() as graph:
        prefill, frontend, other = await graph.prefill(), await graph.frontend("a"), await graph.frontend("b")
        owner = attrgetter(part)(SimpleNamespace(**vars(graph), prefill_engine=prefill.engine))
        monkeypatch.setattr(owner, method, failing(getattr(owner, method), bad))
        beside = await frontend.submit(LONG[:20], 200)
        await other.submit(prompt, 200, request_id=BAD)
        failed = (await other.end_of(BAD)).failed
        assert (failed is not None and failed.retry) is (prompt == SHORT)
        assert not (await frontend.end_of(beside)).failed
        await others_are_served(graph, other, prefill)


async def test_a_failed_cancellation_affects_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_failed_load_report_affects_no_other_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
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
