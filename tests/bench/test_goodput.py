"""Goodput: probes of tiny servers that behave in known ways, and of a simulated graph whose border can be computed."""

import asyncio
import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.goodput.found import lead_of, report_of
from pdserve_bench.goodput.measure import FoundGoodput, GoodputOptions, Probe, find_goodput, probe
from pdserve_bench.goodput.requests import PoissonRequests
from pdserve_bench.launch import PDSERVE
from pdserve_bench.runs import LoadRun, Workload
from pdserve_bench.samples import percentile
from pdserve_bench.slo import Slo, Tally

from pdserve.errors import Unavailable
from pdserve.ports import free_port
from tests.bench.answers import STREAM, Asked, OpenAi, event, tiny_server
from tests.serving import Serve, kv_ports, running

EASY = Slo(5.0, 5.0)
BOUNDLESS = 1e9


class Prefilling(OpenAi):
    """Takes the prompts in turn, `seconds` for each."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds, self._free = seconds, 0.0

    async def _stream(self, body: Any, writer: asyncio.StreamWriter) -> None:
        tiny = body["max_tokens"] == 1
        now = time.monotonic()
        self._free = max(now, self._free) + (0.001 if tiny else self._seconds)
        await asyncio.sleep(self._free - now)
        await super()._stream(body, writer)


def _users(tokens: int = 2, prompt: int = 20, patience: float = 60.0) -> PoissonRequests:
    return PoissonRequests(Prompts(1.0, 7), prompt, tokens, patience=patience)


class Noted:
    """Users, and how many requests were at the server when they began."""

    rate = 1.0

    def __init__(self, users: PoissonRequests, server: OpenAi) -> None:
        self._users, self._server = users, server
        self.at_the_server: list[int] = []

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        self.at_the_server.append(self._server.running)
        return self._users.at(rate, seconds, seed)


async def test_a_hopeless_probe_is_cut_short_and_the_next_one_begins_on_an_idle_server() -> None:
    """This server does not even notice that requests were given up."""
    server = Prefilling(0.05)
    async with tiny_server(server) as tiny:
        options = GoodputOptions(
            Slo(0.35, 5.0), seconds=3.0, start_rate=60.0, lowest=30.0, most_probes=2, warm_up=False
        )
        found, users = FoundGoodput(options), Noted(_users(), server)
        await find_goodput(Endpoint(tiny.url, "tiny"), users, found)
    assert len(found.probes) == 2
    for made in found.probes:
        assert made.hopeless
        assert made.share < 0.9
        assert made.tally.requests == len(made.run.exchanges) == made.judged + made.tally.unfinished
        assert made.tally.ttft > 10
    assert users.at_the_server == [0, 0]


class Forgetful(OpenAi):
    """Of five answers one never begins, and one does not go on."""

    async def _stream(self, body: Any, writer: asyncio.StreamWriter) -> None:
        if len(self.chats) % 5 == 0:
            await asyncio.sleep(BOUNDLESS)
        if len(self.chats) % 5 == 1:
            writer.write(STREAM + event({"choices": [{"text": "t"}]}))
            await asyncio.sleep(BOUNDLESS)
        await super()._stream(body, writer)


async def test_requests_that_never_end_have_kept_nothing() -> None:
    async with tiny_server(Forgetful()) as tiny:
        made = Probe(30.0, 2.0, 1)
        options = GoodputOptions(Slo(1.0, 0.8), share=0.3)
        await probe(Endpoint(tiny.url, "tiny"), _users(), made, options)
    assert not made.hopeless
    assert made.judged == made.tally.requests == len(made.run.exchanges)
    silent, stuck = len(made.run.exchanges) // 5, (len(made.run.exchanges) + 4) // 5
    assert len(made.run.of(Outcome.UNFINISHED)) == silent + stuck
    assert (made.tally.ttft, made.tally.gap) == (silent, stuck)
    assert made.tally.kept == made.judged - silent - stuck
    assert made.run.seconds < 30
    assert percentile(made.longest_gaps, 0.9) > 0.8


def test_a_request_that_was_refused_had_no_fast_first_token() -> None:
    made = Probe(10.0, 1.0, 1, LoadRun(began=100.0, ended=104.0), slo=Slo(0.7, 1.0))
    made.run.exchanges += [
        Exchange(started=100.0, ended=100.001, error="HTTP 503"),
        Exchange(started=100.0, ended=100.9, arrivals=[100.4, 100.5], error="connection: gone"),
        Exchange(started=101.0, ended=102.0, error="no end within 1 s", hung=True),
        Exchange(started=103.0),
        Exchange(started=103.9),
    ]
    assert made.ttfts == pytest.approx([0.4, 1.0, 1.0]), "the last one was cut before it was late"
    made.tally = Tally.of(EASY, made.run.exchanges, 104.0)
    assert made.sent_rate == pytest.approx(5 / 3.9), "some were sent after the end"


async def test_where_requests_alone_miss_no_lower_rate_is_tried() -> None:
    async with tiny_server(OpenAi(ttft=0.3)) as tiny:
        found = FoundGoodput(GoodputOptions(Slo(0.2, 5.0), seconds=3.0, start_rate=4.0, warm_up=False))
        await find_goodput(Endpoint(tiny.url, "tiny"), _users(), found)
    assert (found.carried, found.complete) == (None, True)
    assert len(found.probes) <= 4
    report = report_of(found, "test")
    assert "100 % broke the TTFT" in report.lead
    assert any("had the server to themselves" in note for note in report.notes)


async def test_failed_requests_are_told_with_their_error() -> None:
    class Full(OpenAi):
        async def __call__(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
            self.refused = frozenset({"model"} if asked.body["max_tokens"] > 1 and self.chats else ())
            self.names = False
            await super().__call__(asked, writer)

    async with tiny_server(Full()) as tiny:
        options = GoodputOptions(EASY, seconds=1.0, start_rate=30.0, lowest=30.0, warm_up=False)
        found = FoundGoodput(options)
        await find_goodput(Endpoint(tiny.url, "tiny"), _users(), found)
    assert found.carried is None
    assert found.broken == 30.0
    report = report_of(found, "test")
    assert "100 % failed" in report.lead
    assert "No rate was found" in report.lead
    assert any("bad request" in note for note in report.notes)


async def test_a_server_that_does_not_answer_is_said_to_be_so() -> None:
    found = FoundGoodput(GoodputOptions())
    with pytest.raises(Unavailable, match="does not answer"):
        await find_goodput(Endpoint(f"http://127.0.0.1:{free_port('127.0.0.1')}", "tiny"), _users(), found)
    assert "No probe came to its end" in lead_of(found)


class Stalling:
    """Users, beside whom the generator itself does not get to run."""

    rate = 20.0

    def __init__(self, users: PoissonRequests, probes: int) -> None:
        self._users, self.left = users, probes

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        self.left -= 1
        workload = self._users.at(rate, seconds, seed)
        return _Stalled(workload) if self.left >= 0 else workload


class _Stalled:
    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    async def run(self, endpoint: Endpoint, run: LoadRun) -> None:
        async def stall() -> None:
            while True:
                await asyncio.sleep(0.5)
                _hold(0.8)

        stalls = asyncio.create_task(stall())
        try:
            await self._workload.run(endpoint, run)
        finally:
            stalls.cancel()


def _hold(seconds: float) -> None:
    """The event loop: the server's and the generator's, which are in one process here."""
    time.sleep(seconds)


async def test_a_probe_that_the_generator_disturbed_is_made_once_more() -> None:
    async with tiny_server(OpenAi(ttft=0.02, gap=0.02)) as tiny:
        options = GoodputOptions(
            Slo(5.0, 0.6), seconds=2.0, start_rate=20.0, highest=20.0, most_probes=1, warm_up=False
        )
        found = FoundGoodput(options)
        await find_goodput(Endpoint(tiny.url, "tiny"), Stalling(_users(tokens=20), 2), found)
    first, second = found.probes[:2]
    assert first.disturbed
    assert not first.counted
    assert first.stall > 0.2
    assert second.rate == first.rate
    assert second.seed != first.seed
    assert second.counted
    notes = " ".join(report_of(found, "test").notes)
    assert "The load generator itself was late" in notes
    assert "the limit may be this client's" in notes


def _truth(prefill: float, batch: int) -> float:
    """The rate at which as many as asked for get their first token in time, of a worker that prefills up to `batch`
    waiting prompts in a step, `prefill` seconds for each, and begins idle."""

    def share(rate: float) -> float:
        kept = count = 0
        for seed in range(60):
            dice, arrivals, now = random.Random(seed), list[float](), 0.0
            while (now := now + dice.expovariate(rate)) < SECONDS:
                arrivals.append(now)
            free, place = 0.0, 0
            while place < len(arrivals):
                begin = max(free, arrivals[place])
                taken = [moment for moment in arrivals[place : place + batch] if moment <= begin]
                free = begin + prefill * len(taken)
                kept += sum(free - moment <= TTFT for moment in taken)
                place, count = place + len(taken), count + len(taken)
        return kept / count

    low, high = 0.05 / prefill, 5 / prefill
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if share(middle) >= SHARE else (low, middle)
    return low


PREFILL_RATE, PROMPT, SECONDS, TTFT, SHARE = 4000, 800, 3.0, 1.0, 0.75
"""a fifth of a second for each prompt: no more than five a second can be carried for long"""
GRAPH = f"""
Common: {{model: demo, block-size: 32, max-model-len: 4096}}
Graph: {{kv-port: {{kv_port}}, drain-timeout: 5}}
Frontend: {{served_model_name: demo, port: {{port}}}}
VllmWorker:
  engine: sim
  common-configs: [model, block-size, max-model-len]
  additional-config: {{sim: {{step-seconds: 0.002, prefill-rate: {PREFILL_RATE}}}}}
"""


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    port, folder = free_port("127.0.0.1"), tmp_path_factory.mktemp("goodput")
    yaml = GRAPH.replace("{kv_port}", str(kv_ports())).replace("{port}", str(port))
    serve = Serve(folder, yaml, port=port)
    with running(serve):
        yield serve


def test_the_border_of_a_simulated_graph_is_found(graph: Serve, tmp_path: Path) -> None:
    border = _truth(PROMPT / PREFILL_RATE + 0.002, batch=2)
    assert 4 < border < 6
    shape = f"--prompt-tokens {PROMPT} --answer-len 2 --seconds {SECONDS}"
    slo = f"--ttft {TTFT}s --gap 9s --share {SHARE}"
    asked = f"{slo} --start-rate 15 --precision 0.25 {shape} --json found.json --plot found.html"
    process = subprocess.run(
        [*PDSERVE, "bench", "goodput", "--base-url", graph.url, *asked.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["complete"]
    goodput = found["data"]["goodput"]
    assert goodput["precise"]
    assert 0.5 * border < goodput["estimate"] < 1.4 * border
    assert goodput["carried"] <= goodput["estimate"] <= goodput["broken"] <= 1.26 * goodput["carried"]
    assert f"Goodput: {goodput['estimate']:.3g} req/s" in process.stdout
    assert "broke the TTFT" in process.stdout.splitlines()[-1]
    for made in found["data"]["probes"]:
        assert sum(made["tally"].values()) == made["requests"]
        assert made["finished"] + made["failed"] + made["unfinished"] == made["requests"]
        assert made["tally"]["gap"] == made["tally"]["failed"] == 0
    assert "<svg" in (tmp_path / "found.html").read_text()


def test_ctrl_c_shows_what_is_there_so_far(graph: Serve) -> None:
    asked = f"--seconds 2 --answer-len 2 --start-rate 2 --ttft 9s --gap 9s --base-url {graph.url}"
    command = [*PDSERVE, "bench", "goodput", *asked.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        for line in process.stderr:
            if "goodput: 4 req/s" in line:  # the second probe
                break
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Broken off" in out
    assert "Goodput: at least 2 req/s" in out
    assert "not ended" in out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--ttft soon", "--ttft: 'soon' is no time"),
        ("--gap 0ms", "must be more than nothing"),
        ("--within never", "--within: 'never' is no time"),
        ("--base-url localhost:8000", "--base-url localhost:8000: write it as"),
        ("--json /nowhere/x.json", "there is no folder /nowhere"),
    ],
)
def test_a_wrong_command_line_is_said_at_once(options: str, complaint: str) -> None:
    process = subprocess.run(
        [*PDSERVE, "bench", "goodput", *options.split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 2
    assert complaint in process.stderr


def test_requests_that_no_model_of_the_server_takes_are_a_wrong_command_line(graph: Serve) -> None:
    process = subprocess.run(
        [*PDSERVE, "bench", "goodput", "--base-url", graph.url, "--prompt-tokens", "5000"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 2
    assert "more than demo takes on this server: 4096 tokens" in process.stderr
