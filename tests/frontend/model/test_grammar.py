"""A structured output that no engine can compile is the client's error, found by trying once."""

import pytest

from tests.frontend.conftest import Graph
from tests.frontend.model.sims import sim_engines
from tests.frontend.test_generate import complete, completion

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_without_finite_text_is_a_400_after_one_try(graph: Graph, stream: bool) -> None:
    async with sim_engines(graph, 2) as both:
        for engine in both:
            engine.faults.no_grammars = True
        before = sum(len(engine._seen) for engine in both)  # the self-tests'
        asked = completion(structured_outputs={"regex": "[a-z]+"}, stream=stream)
        answer = await graph.http.post("/v1/completions", json=asked)
        tries = sum(len(engine._seen) for engine in both) - before
        well = await complete(graph)
    assert answer.status_code == 400, answer.text
    assert "cannot be compiled" in answer.json()["error"]["message"]
    assert tries == 1
    assert well.status_code == 200


@pytest.mark.parametrize(
    "asked", [{"regex": "(["}, {"grammar": "root ::= nowhere"}, {"json": {"type": "objectx"}}]
)
async def test_a_grammar_that_cannot_be_parsed_never_reaches_a_worker(
    graph: Graph, asked: dict[str, object]
) -> None:
    async with graph.worker() as worker:
        answer = await complete(graph, structured_outputs=asked)
    assert answer.status_code == 400
    assert "rammar" in answer.json()["error"]["message"]
    assert not worker.seen
