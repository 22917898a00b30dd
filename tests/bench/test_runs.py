"""What the requests of a run say together; how a run ends at a signal."""

import os
import signal
import subprocess
import sys

import pytest
from pdserve_bench.client import Exchange
from pdserve_bench.runs import LoadRun
from pdserve_bench.slo import Slo

BEGAN = 1000.0


def _request(
    at: float, ttft: float | None, ended: float | None, error: str = "", tokens: int = 3, gap: float = 0.1
) -> Exchange:
    """Moments are seconds after the run's begin."""
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
        _request(9, 0.2, 12.0),  # after the end of asking
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
    assert figures["TTFT p50"] == pytest.approx(0.2)
    assert figures["TTFT p99"] == pytest.approx(0.4)
    assert figures["longest gap p99"] == pytest.approx(1.5)
    assert figures["ITL p50"] == pytest.approx(0.1)
    assert figures["tokens/s per request"] == pytest.approx((3 / 2.0 + 3 / 3.6 + 3 / 2.8) / 3)
    assert figures["kept"] == pytest.approx(2 / 6)
    assert figures["goodput"] == pytest.approx(0.2)


def test_a_run_that_was_broken_off_is_as_long_as_it_was() -> None:
    run = _run(_request(0, 0.2, 2.0), _request(1, 0.2, None), ended=4.0)
    figures = run.summary()
    assert (figures["window"], figures["requests/s"], figures["unfinished"]) == (4, 0.25, 1)
    assert "kept" not in figures


def test_an_answer_in_one_piece_has_no_speed() -> None:
    assert _request(0, 0.5, 0.50001, tokens=1).tokens_per_second is None
    assert _request(0, None, 3, "failed").tokens_per_second is None
    assert _request(0, 0.5, 1.0, tokens=2).tokens_per_second == pytest.approx(4)


def test_errors_that_differ_in_numbers_alone_are_one() -> None:
    texts = [
        "HTTP 400 has 4100 tokens",
        "HTTP 503 busy",
        "HTTP 400 has 4231 tokens",
        "HTTP 400 has 5.5 tokens",
    ]
    run = _run(*(_request(1, None, 2, text) for text in texts))
    assert run.errors() == [("HTTP 400 has 4100 tokens", 3), ("HTTP 503 busy", 1)]


PROGRAM = """
import asyncio, sys
from pdserve_bench.runs import run_until_stopped

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
    ("numbers", "code"),
    [
        *(([number], 3) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)),
        ([signal.SIGINT, signal.SIGTERM], -signal.SIGTERM),
    ],
)
def test_a_signal_ends_a_run_in_order_and_a_second_one_at_once(numbers: list[int], code: int) -> None:
    command = [sys.executable, "-c", PROGRAM.format(stopping=60 * (len(numbers) - 1))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_env()) as process:
        assert process.stdout is not None
        for number, said in zip(numbers, ("works\n", "stops what it has started\n"), strict=False):
            assert process.stdout.readline() == said
            process.send_signal(number)
        if code == 3:
            assert process.stdout.read() == "stops what it has started\nstopped\n"
    assert process.returncode == code


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
