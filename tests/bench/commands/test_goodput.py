"""Goodput probes against tiny servers with known behaviour."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.goodput import measure
from pdserve_bench.goodput.measure import GoodputOptions, Probe, probe
from pdserve_bench.goodput.result import GoodputResult, find_goodput, lead_of, report_of
from pdserve_bench.measure.runs import LoadRun, PoissonRequests, Workload
from pdserve_bench.measure.samples import percentile
from pdserve_bench.measure.slo import Slo

from pdserve.util.errors import Unavailable
from tests.bench.answers import STREAM, OpenAi, event, tiny_server
from tests.bench.bench import bench
from tests.conditions import until


class Prefilling(OpenAi):
    """Prefills one prompt at a time. A prompt takes `seconds`, or 1 ms if one token is asked for."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds, self._free = seconds, 0.0

    async def _stream(self, body: Any, writer: asyncio.StreamWriter) -> None:
        tiny = body["max_tokens"] == 1
        now = time.monotonic()
        self._free = max(now, self._free) + (0.001 if tiny else self._seconds)
        await asyncio.sleep(self._free - now)
        await super()._stream(body, writer)


USERS = PoissonRequests(Prompts(1.0, 7), 20, 2, patience=60.0)


@dataclass
class Noted:
    """Users that record, when a probe begins, how many requests are running at the server."""

    server: OpenAi
    at_the_server: list[int] = field(default_factory=list)

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        self.at_the_server.append(self.server.running)
        return USERS.at(rate, seconds, seed)


async def test_hopeless_probes_are_cut_short_and_begin_on_an_idle_server() -> None:
    """The server notices a disconnect only after the prefill."""
    server = Prefilling(0.05)
    async with tiny_server(server) as tiny:
        options = GoodputOptions(
            Slo(0.35, 5.0), seconds=3.0, start_rate=60.0, lowest=30.0, most_probes=2, warm_up=False
        )
        result, users = GoodputResult(options), Noted(server)
        await find_goodput(Endpoint(tiny.url, "tiny"), users, result)
    assert len(result.probes) == 2
    for made in result.probes:
        assert made.hopeless
        assert made.share < 0.9
        assert made.tally.requests == len(made.run.exchanges) == made.judged + made.tally.unfinished
        assert made.tally.ttft > 10
    assert users.at_the_server == [0, 0]


class SlowToStop:
    """Users whose requests all fail, and whose cancellation takes half a second."""

    stopping = False

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        return self

    async def run(self, endpoint: Endpoint, run: LoadRun) -> None:
        run.exchanges += [Exchange(started=run.began, ended=run.began + 0.1, error="no") for _ in range(60)]
        try:
            await asyncio.sleep(60)
        finally:
            self.stopping = True
            await asyncio.sleep(0.5)


async def test_ctrl_c_works_while_a_hopeless_probe_is_cut_short() -> None:
    users, made = SlowToStop(), Probe(20.0, 3.0, 1)
    task = asyncio.create_task(probe(Endpoint("http://127.0.0.1:1", "tiny"), users, made, GoodputOptions()))
    await until(lambda: users.stopping)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made.hopeless
    assert made.tally.failed == 60


class Forgetful(OpenAi):
    """Of five responses, one never begins, and one stops after a token."""

    async def _stream(self, body: Any, writer: asyncio.StreamWriter) -> None:
        if len(self.chats) % 5 == 0:
            await asyncio.sleep(1e9)
        if len(self.chats) % 5 == 1:
            writer.write(STREAM + event({"choices": [{"text": "t"}]}))
            await asyncio.sleep(1e9)
        await super()._stream(body, writer)


async def test_requests_that_never_end_count_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server and load generator share an event loop here; the report says that it was blocked."""
    monkeypatch.setattr(measure, "_HANGS", 3.0)
    made, options = Probe(30.0, 1.0, 1), GoodputOptions(Slo(1.0, 0.8), share=0.3)
    async with tiny_server(Forgetful()) as tiny:
        running = asyncio.create_task(probe(Endpoint(tiny.url, "tiny"), USERS, made, options))
        await until(lambda: len(made.run.exchanges) > 2)
        time.sleep(0.3)  # noqa: ASYNC251
        await running
    assert made.stall > 0.2
    result = GoodputResult(options)
    result.probes.append(made)
    assert "The load generator itself was late" in " ".join(report_of(result, "test").notes)
    assert not made.hopeless
    assert made.judged == made.tally.requests == len(made.run.exchanges)
    silent, stuck = len(made.run.exchanges) // 5, (len(made.run.exchanges) + 4) // 5
    assert len(made.run.of(Outcome.FAILED)) == made.tally.failed == silent + stuck
    assert made.tally.kept == made.judged - silent - stuck
    assert made.run.seconds < 30
    assert percentile(made.longest_gaps, 0.9) > 0.8


def test_ttfts_include_waits_beyond_the_bound_but_no_refusals() -> None:
    made = Probe(10.0, 1.0, 1, LoadRun(began=100.0, ended=104.0), slo=Slo(0.7, 1.0))
    made.run.exchanges += [
        Exchange(started=100.0, ended=100.001, error="HTTP 503"),
        Exchange(started=100.0, ended=100.9, arrivals=[100.4, 100.5], error="connection: gone"),
        Exchange(started=101.0, ended=102.0, error="no end within 1 s", hung=True),
        Exchange(started=103.0),
        Exchange(started=103.9),
    ]
    assert made.ttfts == pytest.approx([0.4, 1.0, 1.0]), "the last one was cut before it was late"


async def test_a_server_without_responses_is_reported() -> None:
    result = GoodputResult(GoodputOptions())
    with pytest.raises(Unavailable, match="does not answer"):
        await find_goodput(Endpoint("http://127.0.0.1:1", "tiny"), USERS, result)
    assert "No probe came to its end" in lead_of(result)


async def test_the_goodput_of_a_known_server_is_found(tmp_path: Path) -> None:
    """The server takes 0.2 s per prompt. At r requests/s, a request that arrives after t seconds waits t (r / 5 - 1)
    seconds. At r = 7.7, three quarters of the requests wait at most 0.8 s. On a busy machine, the goodput is lower."""
    load = "--prompt-tokens 20 --answer-len 2 --seconds 2 --start-rate 10 --precision 0.4"
    slo = "--ttft 1s --gap 9s --share 0.75 --json found.json"
    async with tiny_server(Prefilling(0.2)) as tiny:
        code, out, err = await bench(f"goodput --base-url {tiny.url} {load} {slo}", tmp_path, 150)
    assert code == 0, err
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["complete"]
    goodput = found["data"]["goodput"]
    assert goodput["precise"]
    assert 1 < goodput["estimate"] < 11
    assert goodput["carried"] <= goodput["estimate"] <= goodput["broken"] <= 1.41 * goodput["carried"]
    assert f"Goodput: {goodput['estimate']:.3g} req/s" in out
    assert "missed: TTFT " in out.splitlines()[-1]
    for made in found["data"]["probes"]:
        assert sum(made["tally"].values()) == made["requests"]
        assert made["finished"] + made["failed"] + made["unfinished"] == made["requests"]
        assert made["tally"]["gap"] == made["tally"]["failed"] == 0
