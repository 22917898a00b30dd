"""The multi-round workload: when users join and ask, their messages, and the report."""

import asyncio
import json
import re
import time
from collections import Counter
from dataclasses import replace
from itertools import count, groupby, pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
from pdserve_bench.client import Outcome
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.measure.runs import LoadRun
from pdserve_bench.multi_round.summary import MultiRoundResult
from pdserve_bench.multi_round.workload import MultiRound, Question, Texts

from tests.bench.answers import Asked, OpenAi, Respond, TinyServer, tiny_server, whole
from tests.bench.bench import bench
from tests.conditions import until


def _load(users: int, rounds: int, qps: float, **more: Any) -> MultiRound:
    return MultiRound(num_users=users, num_rounds=rounds, qps=qps, **more)


def test_the_number_of_active_users_stays_about_constant() -> None:
    """A user asks six times, once per interval, and leaves. Another joins every 2.5 s."""
    load, interval = _load(20, 6, 2, seed=7), 10.0
    assert (load.interval, load.joining, load.rate) == pytest.approx((interval, 2.5, 2.4))
    visits = list(takewhile(lambda visit: visit.at < 100, load.visits()))
    stays = [(visit.at, visit.at + (load.num_rounds - visit.first_round) * interval) for visit in visits]
    for moment in range(int(2 * interval), 90):  # earlier, not all initial users have asked
        assert sum(came <= moment <= left for came, left in stays) == pytest.approx(20, abs=3)
    assert [visit.user for visit in visits] == list(range(1, len(visits) + 1))
    assert [visit.at for visit in visits] == sorted(visit.at for visit in visits)


def test_texts_have_as_many_words_as_were_asked_for() -> None:
    texts = Texts(200, 400, seed=1)
    first, second = texts.first(1), texts.first(2)
    shared, history = first.split(". I am user 1, and this is what we spoke about: ")
    assert (len(shared.split()), len(history.split())) == (200, 400)
    assert second.startswith(f"{shared}. I am user 2,")
    assert texts.first(1) == first
    assert Texts(200, 400, seed=6).first(1).split()[:20] != first.split()[:20]
    assert history not in second


def _small(**changes: Any) -> MultiRound:
    """A user joins every 0.5 s and asks three questions, half a second apart: 6 requests/s."""
    small = _load(2, 3, 4, shared_system_prompt=20, user_history_prompt=10, answer_len=3, seconds=2.5)
    return replace(small, **changes)


async def _ran(load: MultiRound, server: Respond | None = None) -> tuple[LoadRun, TinyServer]:
    run = LoadRun()
    async with tiny_server(server or OpenAi(gap=0.01)) as tiny:
        await load.run(Endpoint(tiny.url, "tiny"), run)
    return run, tiny


def _questions(run: LoadRun) -> list[Question]:
    return [exchange for exchange in run.exchanges if isinstance(exchange, Question)]


def _of_users(run: LoadRun) -> list[list[Question]]:
    questions = sorted(_questions(run), key=lambda question: (question.user, question.started))
    return [list(asked) for _, asked in groupby(questions, lambda question: question.user)]


async def test_chats_grow_with_the_answers_and_are_asked_at_the_rate() -> None:
    load = _small()
    run, server = await _ran(load)
    questions = _questions(run)
    assert load.rate == 6
    assert len(questions) == pytest.approx(15, abs=7)
    assert run.asks_until - run.began == 2.5
    assert all(question.started < run.asks_until + 15 for question in questions)
    for of_user in _of_users(run):
        assert [question.round for question in of_user] == list(range(1, len(of_user) + 1))
        meant = [question.started - question.late for question in of_user]  # half a second apart
        assert all(after - before > 0.3 for before, after in pairwise(meant))
    assert {question.error for question in questions} == {""}
    assert {question.round for question in questions} == {1, 2, 3}
    chats: dict[str, list[Any]] = {}
    for asked in server.asked:
        assert asked.path == "/v1/chat/completions"
        assert (asked.body["max_tokens"], asked.body["temperature"], asked.body["stream"]) == (3, 0, True)
        chats.setdefault(asked.body["messages"][0]["content"], []).append(asked.body["messages"])
    assert len(chats) == len({question.user for question in questions})
    for rounds in chats.values():
        for number, messages in enumerate(rounds, 1):
            assert [message["role"] for message in messages] == (["user", "assistant"] * number)[:-1]
            assert [message["content"] for message in messages[1::2]] == ["t0 t1 t2 "] * (number - 1)
            assert messages[:-2] == (rounds[number - 2] if number > 1 else [])
    shared = {" ".join(opening.split()[:20]) for opening in chats}
    assert len(shared) == 1
    prompts = {place: [q.prompt_tokens for q in questions if q.round == place] for place in (1, 2, 3)}
    assert max(prompts[1]) < min(prompts[2]) <= max(prompts[2]) < min(prompts[3])


async def test_users_wait_for_a_slow_server() -> None:
    """A user waits for each response before the next question, so users stay longer and more are active."""
    slow = OpenAi(ttft=0.7)
    run, _ = await _ran(_small(seconds=3), slow)
    pairs = [pair for of_user in _of_users(run) for pair in pairwise(of_user)]
    assert pairs
    assert all(after.started >= before.ended for before, after in pairs)
    assert all(after.held > 0.15 for _, after in pairs)
    assert slow.most > 2


async def test_late_responses_stay_unfinished() -> None:
    """`time.sleep` blocks the load generator, which records its delay."""
    async with tiny_server(OpenAi(ttft=30)) as tiny:
        run, load = LoadRun(), _load(9, 1, 9, answer_len=1, seconds=1, patience=0.5)
        asking = asyncio.create_task(load.run(Endpoint(tiny.url, "tiny"), run))
        await until(lambda: len(run.exchanges) > 2)
        time.sleep(0.5)  # noqa: ASYNC251
        await asking
    assert {question.outcome for question in run.exchanges} == {Outcome.UNFINISHED}
    assert 1.5 <= run.ended - run.began < 25
    assert dict(_result(run).lines())["Average TTFT"] == "none"
    assert max(question.late for question in _questions(run)) > 0.25


async def test_a_failed_question_leaves_no_trace_in_the_chat() -> None:
    """The server refuses every other request."""
    tiny = OpenAi()
    numbers = count()

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if next(numbers) % 2:
            writer.write(whole({"error": {"message": "busy"}}, 503))
        else:
            await tiny(asked, writer)

    run, server = await _ran(_small(), respond)
    for asked in server.asked:
        roles = [message["role"] for message in asked.body["messages"]]
        assert roles == (["user", "assistant"] * len(roles))[: len(roles)]
        assert (
            len(asked.body["messages"][0]["content"].split()) > 30
        )  # the opening is sent until a request succeeds
    outcomes = Counter(question.outcome for question in run.exchanges)
    assert outcomes[Outcome.FAILED] == pytest.approx(outcomes[Outcome.FINISHED], abs=1)
    report = _result(run).report()
    assert f"{outcomes[Outcome.FAILED]} requests failed: HTTP 503 busy" in report.notes


def _result(run: LoadRun) -> MultiRoundResult:
    return MultiRoundResult(_small(), Endpoint("http://127.0.0.1:1", "tiny", chat=True), run)


def _question(at: float, ttft: float, round_: int = 1, user: int = 1, **more: Any) -> Question:
    """A question asked `at` seconds after a run began (at time 100), with three tokens 40 ms apart."""
    question = Question(started=100 + at, ended=100 + at + ttft + 0.1, round=round_, user=user, **more)
    question.arrivals = [100 + at + ttft + 0.04 * number for number in range(3)]
    question.prompt_tokens = 100 * round_
    return question


def _known() -> LoadRun:
    """A run that asked questions for ten seconds and ended after twelve."""
    failed = Question(started=102, ended=103, error="HTTP 500 no", user=2, round=1)
    unfinished = Question(started=109.9, user=3, round=2)
    answered = [_question(0.5, 0.2), _question(2, 0.1, 2), _question(4, 0.6, 3), _question(9.8, 0.3, user=3)]
    return LoadRun([*answered, failed, unfinished], 100, 112, 110)


def test_the_summary_has_the_lines_of_multi_round_qa() -> None:
    *lines, (name, times) = _result(_known()).lines()
    assert lines == [
        ("QPS", "4.0000 reqs/s"),
        ("Processing speed", "0.4124 reqs/s"),
        ("Requests on-the-fly", "1"),
        ("Input tokens per second", "72.1649 tokens/s"),
        ("Output tokens per second", "1.2371 tokens/s"),
        ("Average generation throughput (per request)", "30.0000 tokens/req/s"),
        ("Average TTFT", "0.3000s"),
    ]
    assert name == "Time range"
    assert re.fullmatch(r"\d{10}\.\d{3} - \d{10}\.\d{3} \(9\.70s\)", times)


def test_the_report_accounts_for_every_request() -> None:
    report = _result(_known()).report()
    rounds = [row[:4] for row in report.tables[2].rows]
    assert rounds == [["1", 3, 2, 100], ["2", 2, 1, 200], ["3", 1, 1, 300]]
    assert report.lead == "6 requests of 3 users: 4 finished, 1 failed, 1 unfinished."
    assert report.notes[0] == (
        "While questions were asked, for 10 s: 0.30 requests/s were answered of 0.60 that were asked; "
        "6.00 were planned. Seed 1."
    )
    outcomes = [request["outcome"] for request in report.data["requests"]]
    assert outcomes == [*["finished"] * 4, "failed", "unfinished"]


def test_causes_of_wrong_figures_are_reported() -> None:
    run = LoadRun([_question(0, 0.1, late=0.4)], 100, 110, 110)
    run.exchanges[0].arrivals = run.exchanges[0].arrivals[:2]
    notes = " ".join(_result(run).report().notes)
    assert "This program was late itself, by 0.40 s" in notes
    assert "Answers had 2 tokens on average, not 3: the server ends them itself" in notes


async def test_the_command_reports_all_requests(tmp_path: Path) -> None:
    """The server reports no usage."""
    tiny = OpenAi(gap=0.01, usage=False)
    small = "multi-round --warm-up 2 --num-users 4 --answer-len 3 --time 2 --json found.json"
    async with tiny_server(tiny) as server:
        code, out, err = await bench(f"{small} --base-url {server.url}/v1", tmp_path)
    assert code == 0, err
    found = json.loads((tmp_path / "found.json").read_text())
    figures = found["data"]["figures"]
    assert figures["requests"] == figures["finished"] > 5
    assert len(tiny.chats) == figures["requests"] + 3  # the check of the server, and two of the warm-up
    assert {asked.headers["authorization"] for asked in server.asked} == {"bearer k"}
    assert found["complete"]
    assert re.search(r"QPS +10\.0000 reqs/s", out)
    assert "The server tells no usage" in out
    assert "questions, about 2 s" in err
