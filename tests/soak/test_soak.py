"""Short runs of `python -m pdserve_bench.soak` and `.fuzz` with real processes, NATS and etcd, and simulated engines.
Both use one graph. The soak runs first, because its margins are narrower."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.fuzz import attack, schema
from pdserve_bench.fuzz.corpus import hostile_requests, streamed, unfinished
from pdserve_bench.fuzz.fuzzer import Fuzzer, FuzzReport
from pdserve_bench.fuzz.request import FuzzRequest
from pdserve_bench.fuzz.responses import EXCUSED, problem, twin_problem
from pdserve_bench.graphs.launch import REAL, StartedGraph, started
from pdserve_bench.graphs.simulated import simulated, write
from pdserve_bench.soak.__main__ import soak
from pdserve_bench.soak.requests import Ending, MixedLoad
from pdserve_bench.soak.usage import Usage, leaks

from tests.bench.answers import DONE, STREAM, event, fixed, tiny_server, whole

BY_SCHEMATHESIS = 100


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def graph(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StartedGraph]:
    folder = tmp_path_factory.mktemp("graph")
    sections = simulated(
        {"step-seconds": 0.005, "prefill-rate": 20000},
        decode={"max-num-seqs": 32},
        common={"num-gpu-blocks-override": 4096, "max-model-len": 2048},
    )
    async with started(write(sections, folder / "sim.yaml"), folder, print, thresholds=True) as running:
        yield running


IDLE = Usage(blocks=0, sockets=9, files=20, tasks=20, threads=15, MiB=600)


@pytest.mark.parametrize(
    ("after", "found"),
    [
        ({"decode-0": IDLE}, []),
        ({"decode-0": Usage(0, 10, 21, 21, 17, 610)}, []),
        ({"decode-0": Usage(0, 9, 20, 20, 15, 500)}, []),
        ({"decode-0": Usage(1, 9, 20, 20, 15, 600)}, ["decode-0: blocks 0 -> 1"]),
        ({"decode-0": IDLE, "decode-1": IDLE}, ["decode-1 is new"]),
        (
            {"decode-0": Usage(0, 30, 20, 40, 15, 600)},
            ["decode-0: sockets 9 -> 30", "decode-0: tasks 20 -> 40"],
        ),
        ({"decode-0": Usage(0, 9, 20, 20, 15, 700)}, ["decode-0: MiB 600 -> 700"]),
        ({}, ["decode-0 is gone"]),
    ],
)
def test_what_counts_as_a_leak(after: dict[str, Usage], found: list[str]) -> None:
    assert leaks({"decode-0": IDLE}, after) == found


def test_blocks_that_were_in_use_before_count_as_leaked_too() -> None:
    held = {"decode-0": Usage(blocks=3)}
    assert leaks(held, held) == ["decode-0: blocks 0 -> 3"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_graph_leaks_nothing_after_requests_that_ended_in_every_way(graph: StartedGraph) -> None:
    report = await soak(graph.graph, 150, 600, (8, 900), seed=7)
    assert report.problems == []
    assert sum(report.load.done.values()) == 600
    for ending in Ending:
        assert any(what.startswith(ending) for what in report.load.done), ending


@pytest.mark.parametrize(
    ("ending", "seed", "answer"),
    [
        (Ending.WHOLE, 1, STREAM + event({"error": {"message": "engine died", "code": 500}}) + DONE),
        (Ending.WHOLE, 1, STREAM + event({"choices": [{"text": "a", "finish_reason": "abort"}]}) + DONE),
        (
            Ending.WHOLE,
            0,
            whole({"object": "error", "error": {"message": "engine died"}}),
        ),  # not streamed
        (Ending.MIDWAY, 1, whole({"error": {"message": "engine died"}}, 500)),
    ],
)
async def test_a_wrong_answer_is_a_surprise(ending: Ending, seed: int, answer: bytes) -> None:
    async with tiny_server(fixed(answer)) as server:
        load = MixedLoad(lambda: Endpoint(server.url, "tiny"), (8, 20), seed)
        await load._request(ending)
    assert not load.done
    assert len(load.surprises) == 1


def test_names_of_handwritten_requests_are_unique() -> None:
    names = [request.name for request in hostile_requests("demo")]
    assert len(names) == len(set(names)) > 150


@pytest.mark.parametrize(
    ("status", "answer", "without", "wrong"),
    [
        (200, b"data: {}", 400, "status 200, without `stream` 400"),
        (400, b"{}", 200, "status 400, without `stream` 200"),
        (400, b"{}", 400, ""),
        (400, b"not available when `stream=True`", 200, ""),
        (429, b"{}", 200, ""),
    ],
)
def test_a_stream_has_the_status_of_the_same_request_without_stream(
    status: int, answer: bytes, without: int, wrong: str
) -> None:
    assert twin_problem(status, answer, without).partition(":")[0] == wrong


def test_most_handwritten_requests_are_also_sent_as_streams() -> None:
    assert len(list(streamed(hostile_requests("demo")))) > 100


OPENAI = {"error": {"message": "m", "type": "t", "param": None, "code": 400}}
ANTHROPIC = {"type": "error", "error": {"type": "t", "message": "m"}}
EVENTS = b'data: {"choices": []}\n\n'


@pytest.mark.parametrize(
    ("path", "status", "kind", "answer", "wrong"),
    [
        ("/v1/completions", 400, "application/json", json.dumps(OPENAI).encode(), ""),
        ("/v1/completions", 400, "application/json", json.dumps(ANTHROPIC).encode(), "without a valid error"),
        ("/v1/messages", 400, "application/json", json.dumps(ANTHROPIC).encode(), ""),
        ("/v1/completions", 404, "application/json", json.dumps(OPENAI).encode(), "without a valid error"),
        ("/v1/completions", 400, "text/plain", b"no", "without a valid error"),
        ("/v1/completions", 500, "application/json", json.dumps(OPENAI).encode(), "status 500"),
        ("/v1/completions", 500, "application/json", b"list index out of range", "status 500"),
        ("/v1/completions", 0, "", b"", "no answer"),
        ("/v1/completions", 200, "application/json", b"{", "no JSON"),
        ("/v1/completions", 200, "text/event-stream", EVENTS + b"data: [DONE]\n\n", ""),
        ("/v1/completions", 200, "text/event-stream", EVENTS, "without a last event"),
        ("/v1/completions", 200, "text/event-stream", b"data: {\n\ndata: [DONE]\n\n", "invalid JSON"),
        ("/v1/messages", 200, "text/event-stream", b'data: {"type": "message_stop"}\n\n', ""),
        ("/v1/completions", 200, "text/event-stream", b'data: {"error": {"code": 500}}\n\n', "in the stream"),
    ],
)
def test_answers_are_judged(path: str, status: int, kind: str, answer: bytes, wrong: str) -> None:
    found = problem(FuzzRequest("x", path, b""), status, kind, answer)
    assert wrong in found
    assert bool(found) == bool(wrong)


def test_only_an_expected_status_is_right() -> None:
    request = FuzzRequest("x", "/", b"", expected=frozenset({404, 504}))
    answer = json.dumps({"error": {**OPENAI["error"], "code": 504}}).encode()
    assert problem(request, 504, "application/json", answer) == ""
    assert "not [404, 504]" in problem(request, 200, "application/json", b"{}")


def test_a_finding_can_be_sent_again(tmp_path: Path) -> None:
    short = FuzzRequest("x", "/a?b", b'{"it\'s": 1}', {"x-a": "\xff", "x-b": ""}, "PUT")
    assert short.wire("h").startswith(b"PUT /a?b HTTP/1.1\r\nhost: h\r\n")
    assert b"\r\nx-a: \xff\r\n" in short.wire("h")
    assert "-X PUT 'http://h/a?b'" in short.curl("http://h", tmp_path)
    long = FuzzRequest("x", "/", b"\0" * 10)
    command = long.curl("http://h", tmp_path)
    assert Path(command.rpartition("@")[2]).read_bytes() == long.raw


def test_failures_by_schemathesis_count_unless_each_is_excused() -> None:
    excused = f"=== FAILURES ===\n- ST101 Server error\n`{next(iter(EXCUSED))}`\n"
    assert schema.failures(excused) == ""
    assert schema.failures(excused + "- ST101 Server error\n`no`\n").startswith("=== FAILURES")
    assert schema.failures("no schema") == "no schema"


@pytest.mark.asyncio(loop_scope="module")
async def test_requests_of_every_shape_leave_nothing_behind(graph: StartedGraph, tmp_path: Path) -> None:
    """No response is a 5xx, no request, block or slot stays in use, and no process is lost. The canary, a
    well-behaved client, gets correct tokens."""
    fuzzer = Fuzzer(graph.graph, graph.state_dir / "logs")
    async with fuzzer.watching():
        await fuzzer.run(hostile_requests("demo"), 4)
        await fuzzer.run(streamed(hostile_requests("demo")), 4)
        await fuzzer.run(unfinished(hostile_requests("demo"), seed=3))
        sent, failures = await schema.run(graph.graph.url, tmp_path, BY_SCHEMATHESIS, seed=1)
    report = fuzzer.report
    findings = [
        f"{finding.what}\n{finding.request and finding.request.curl('http://graph', tmp_path)}"
        for finding in report.findings
    ]
    assert not findings, "\n".join(findings)
    assert not failures, failures
    assert sent > BY_SCHEMATHESIS // 2
    assert report.canaries > 5
    assert report.statuses["200"] > 50, json.dumps(report.statuses)
    assert report.statuses["400"] > 50
    assert report.statuses["left"] > 0


@pytest.mark.engines
@pytest.mark.timeout(900)
async def test_greedy_clients_do_not_starve_another(tmp_path: Path) -> None:
    """Greedy clients send many long prompts, a large `n`, or requests whose responses they do not read. Each response
    takes half a minute. The canary waits for none."""
    kinds = ["unread", "many", "streams", "prompts"]
    report = await attack.attacked(REAL, tmp_path, kinds, 20.0, print, beyond=10.0)
    assert not [finding.what for finding in report.findings]
    assert report.canaries > 10
    assert report.statuses["streams: unfinished"] > 20
    assert report.statuses["unread: unfinished"] > 20


@pytest.mark.parametrize(
    ("text", "statuses", "finding"),
    [
        ('warning: slow\n{"many: 200": 3}\n', {"many: 200": 3}, ""),
        ('{"many: 200": 3}\nTraceback (most recent call last):\n  KeyError\n', {"many: 200": 3}, ""),
        ("", {}, "they said: nothing"),
        ("Traceback (most recent call last):\nMemoryError\n", {}, "MemoryError"),
    ],
)
def test_attackers_that_end_without_a_report_are_a_finding(
    text: str, statuses: dict[str, int], finding: str
) -> None:
    report = FuzzReport()
    attack.add_statuses(report, text)
    assert report.statuses == statuses
    assert [finding in each.what for each in report.findings] == ([True] if finding else [])
