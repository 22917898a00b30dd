"""The summary of a run's requests; runs interrupted by a signal."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.measure.runs import LoadRun, OpenLoop
from pdserve_bench.measure.slo import Slo

from tests.bench.answers import OpenAi, tiny_server
from tests.conditions import until

BEGAN = 1000.0


def _request(
    at: float, ttft: float | None, ended: float | None, error: str = "", tokens: int = 3, gap: float = 0.1
) -> Exchange:
    """`at`, `ended`: seconds after the run's start; `ttft`: after `at`."""
    exchange = Exchange(started=BEGAN + at, ended=BEGAN + ended if ended else 0.0, error=error)
    if ttft is not None:
        exchange.arrivals = [BEGAN + at + ttft + number * gap for number in range(tokens)]
    exchange.prompt_tokens = 10
    return exchange


def _run(*exchanges: Exchange, asks_until: float = 10.0, ended: float = 14.0) -> LoadRun:
    until = BEGAN + asks_until if asks_until else 0.0
    return LoadRun(list(exchanges), BEGAN, BEGAN + ended if ended else 0.0, until)


def test_every_request_is_accounted_for() -> None:
    run = _run(
        _request(0, 0.2, 2.2),
        _request(1, 0.4, 5.0, gap=1.5),
        _request(9, 0.2, 12.0),  # ends after the window of 10 s
        _request(2, None, 3, "HTTP 503 busy"),
        _request(8, 0.5, 13, "connection: reset"),
        _request(9, None, None),
    )
    figures = run.summary(Slo(0.3, 1.0))
    named = ("requests", "finished", "failed", "unfinished", "window", "seconds")
    assert [figures[name] for name in named] == [6, 3, 2, 1, 10, 14]
    assert figures["requests/s"] == pytest.approx(0.2)
    assert figures["input tokens/s"] == pytest.approx(2)
    assert figures["output tokens/s"] == pytest.approx(0.6)
    assert figures["TTFT mean"] == pytest.approx((0.2 + 0.4 + 0.2) / 3)
    assert figures["TTFT p99"] == pytest.approx(0.4)
    assert figures["longest gap p99"] == pytest.approx(1.5)
    assert figures["ITL p50"] == pytest.approx(0.1)
    assert figures["tokens/s per request"] == pytest.approx((3 / 2.0 + 3 / 3.6 + 3 / 2.8) / 3)
    assert figures["kept"] == pytest.approx(2 / 6)
    assert figures["goodput"] == pytest.approx(0.2)


def test_an_interrupted_run_has_its_actual_length() -> None:
    run = _run(_request(0, 0.2, 2.0), _request(1, 0.2, None), ended=4.0)
    figures = run.summary()
    assert (figures["window"], figures["requests/s"], figures["unfinished"]) == (4, 0.25, 1)
    assert "kept" not in figures


def test_errors_that_differ_only_in_numbers_count_as_one() -> None:
    texts = ["HTTP 400 has 4100 tokens", "HTTP 503 busy", "HTTP 400 has 5.5 tokens"]
    run = _run(*(_request(1, None, 2, text) for text in texts))
    assert run.errors() == [("HTTP 400 has 4100 tokens", 2), ("HTTP 503 busy", 1)]


async def test_an_open_loop_sends_on_time_whatever_happened_to_earlier_requests() -> None:
    """The server does not respond. Cancelled requests stay unfinished."""
    dues, run = (0.0, 0.1, 0.2, 0.3), LoadRun()
    async with tiny_server(OpenAi(ttft=30)) as server:
        workload = OpenLoop([(due, lambda endpoint: endpoint.body("a", 9)) for due in dues], 60.0, 60.0)
        work = asyncio.create_task(workload.run(Endpoint(server.url, "tiny"), run))
        await until(lambda: len(server.asked) == len(dues))
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert [(each.outcome, each.error) for each in run.exchanges] == [(Outcome.UNFINISHED, "")] * len(dues)
    times = [each.started - run.began for each in run.exchanges]
    assert all(time >= due - 0.01 for time, due in zip(times, dues, strict=True))
    assert run.asks_until == run.began + 60.0 > run.ended > run.began


PROGRAM = """
import asyncio, sys
from pdserve_bench.measure.runs import run_until_stopped

async def work():
    print("works", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("stops what it has started", flush=True)
        await asyncio.sleep({stopping})

print("complete" if run_until_stopped(work) else "stopped")
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("numbers", "code"), [([signal.SIGHUP], 3), ([signal.SIGINT, signal.SIGTERM], -signal.SIGTERM)]
)
def test_a_signal_stops_a_run_gracefully_and_a_second_one_kills_it(numbers: list[int], code: int) -> None:
    command = [sys.executable, "-c", PROGRAM.format(stopping=60 * (len(numbers) - 1))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for number, said in zip(numbers, ("works\n", "stops what it has started\n"), strict=False):
            assert process.stdout.readline() == said
            process.send_signal(number)
        if code == 3:
            assert process.stdout.read() == "stops what it has started\nstopped\n"
    assert process.returncode == code
