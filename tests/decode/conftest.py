"""Fixtures that tests of workers share."""

from collections.abc import AsyncIterator

import pytest

from tests.decode.graph import LONG, ActedPrefill, FrontendStream, Prefill, WorkerGraph


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers whose KV is not read are repeated after 0.05 s."""
    monkeypatch.setattr("pdserve.prefill.answer_sender.REPEAT_AFTER", 0.05)
    monkeypatch.setattr("pdserve.prefill.answer_sender.POLL_INTERVAL", 0.01)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote prefill times out after 0.1 s."""
    monkeypatch.setattr("pdserve.decode.policy.decision.MIN_TIMEOUT", 0.1)
    monkeypatch.setattr("pdserve.decode.policy.decision.TIMEOUT_FACTOR", 0.0)


@pytest.fixture
async def graph() -> AsyncIterator[WorkerGraph]:
    async with WorkerGraph() as graph:
        yield graph


@pytest.fixture
async def frontend(graph: WorkerGraph) -> FrontendStream:
    return await graph.frontend()


@pytest.fixture
async def prefill(graph: WorkerGraph) -> Prefill:
    return await graph.prefill()


@pytest.fixture
async def acted(graph: WorkerGraph) -> ActedPrefill:
    return await graph.act_prefill()


@pytest.fixture
async def pulled(acted: ActedPrefill, frontend: FrontendStream) -> str:
    """The id of a request that the acted prefill worker has pulled."""
    request_id = await frontend.submit(LONG)
    await acted.pull()
    return request_id
