"""Multi-round QA against a graph of simulated engines, through pdserve's own frontend."""

from collections.abc import Iterator

import pytest
from pdserve_bench.client import Outcome
from pdserve_bench.endpoint import Endpoint, find_endpoint
from pdserve_bench.multi_round.summary import MultiRoundResult
from pdserve_bench.multi_round.workload import MultiRound, Question
from pdserve_bench.runs import LoadRun
from pdserve_bench.slo import Slo

from pdserve.ports import free_port
from tests.serving import FRONTEND, WORKERS, Serve, kv_ports, running


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    port = free_port("127.0.0.1")
    yaml = (FRONTEND + WORKERS).format(port=port, kv_port=kv_ports(), workers=1)
    serve = Serve(tmp_path_factory.mktemp("graph"), yaml, port=port)
    with running(serve):
        yield serve


async def _ran(graph: Serve, load: MultiRound) -> tuple[Endpoint, LoadRun, list[Question]]:
    endpoint, run = await find_endpoint(f"{graph.url}/v1"), LoadRun()
    await load.run(endpoint, run)
    return endpoint, run, [exchange for exchange in run.exchanges if isinstance(exchange, Question)]


async def test_later_rounds_find_the_chat_in_the_prefix_cache(graph: Serve) -> None:
    """So that only the first prompts of chats are long enough to be prefilled remotely."""
    load = MultiRound(num_users=4, qps=4, answer_len=5, seconds=4, patience=60, seed=11)
    endpoint, run, questions = await _ran(graph, load)
    assert (endpoint.model, endpoint.max_model_len, endpoint.without) == ("demo", 4096, frozenset())
    assert {question.outcome for question in questions} == {Outcome.FINISHED}, run.errors()
    assert {question.output_tokens for question in questions} == {5}
    assert len(questions) == pytest.approx(load.rate * load.seconds, abs=12)
    prefilled = {place: [q.prefill for q in questions if q.round == place] for place in (1, 2, 3)}
    assert all(prefilled.values())
    remote = {place: modes.count("remote") / len(modes) for place, modes in prefilled.items()}
    assert remote[1] > 0.9
    assert max(remote[2], remote[3]) < 0.1
    lengths = {place: [q.prompt_tokens for q in questions if q.round == place] for place in (1, 2, 3)}
    assert all(600 < length < 700 for length in lengths[1])
    assert max(lengths[1]) < min(lengths[2])
    assert max(lengths[2]) < min(lengths[3])


async def test_a_chat_that_outgrows_the_model_is_told(graph: Serve) -> None:
    load = MultiRound(
        num_users=1,
        num_rounds=4,
        qps=4,
        user_history_prompt=3800,
        answer_len=8,
        seconds=2.5,
        patience=60,
        seed=12,
    )
    endpoint, run, questions = await _ran(graph, load)
    assert load.longest_chat > endpoint.max_model_len
    failed = [question for question in questions if question.outcome is Outcome.FAILED]
    assert failed
    assert {question.status for question in failed} == {400}
    report = MultiRoundResult(load, endpoint, run, Slo()).report()
    (hint,) = [note for note in report.notes if "--user-history-prompt" in note]
    assert hint.startswith(
        f"{len(failed)} requests seem to have been longer than the model's context (4096 tokens)"
    )
