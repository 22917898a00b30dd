"""`pdserve bench replay` sends a trace's requests at their times, and reports the server over time."""

import json
from pathlib import Path

import pytest
from pdserve_bench.client import Exchange
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.measure.slo import Slo
from pdserve_bench.measure.trace import read_trace
from pdserve_bench.replay.prefixes import one_cache
from pdserve_bench.replay.result import ReplayResult
from pdserve_bench.replay.sample import Sample

from pdserve.util.errors import ConfigError
from tests.bench.answers import OpenAi, tiny_server
from tests.bench.bench import bench

ENDPOINT = Endpoint("http://127.0.0.1:1", "m")


def trace_file(folder: Path, *requests: tuple[float | None, int, int]) -> Path:
    """Write a trace of timestamps (ms), input lengths and output lengths."""
    lines = [
        {"input_length": tokens, "output_length": answer, **({} if at is None else {"timestamp": at})}
        for at, tokens, answer in requests
    ]
    file = folder / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_speed_divides_the_times_of_requests(tmp_path: Path) -> None:
    trace = read_trace(trace_file(tmp_path, (5000, 20, 2), (4000, 10, 1), (9000, 30, 3)))
    arrivals = trace.replayed(2.0, 60.0, seed=1)
    assert [due for due, _ in arrivals] == [0.0, 0.5, 2.5]
    assert [body(ENDPOINT)["max_tokens"] for _, body in arrivals] == [1, 2, 3]
    assert len(trace.replayed(2.0, 1.0, seed=1)) == 2, "only the first second of the replay"
    (_, first), *_ = trace.replayed(1.0, 60.0, seed=2)
    assert first(ENDPOINT)["prompt"] != arrivals[0][1](ENDPOINT)["prompt"], "another seed gives other prompts"


def test_a_replay_needs_timestamps(tmp_path: Path) -> None:
    trace = read_trace(trace_file(tmp_path, (0, 20, 2), (None, 10, 1)))
    with pytest.raises(ConfigError, match=r"trace\.jsonl: a replay needs the timestamp of each request"):
        trace.replayed(1.0, 60.0, seed=1)


def test_shrinking_keeps_the_shared_fraction_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [{"input_length": 1600, "output_length": 3, "hash_ids": [0, 1, number, 4]} for number in (2, 3)]
    file.write_text("\n".join(map(json.dumps, lines)))
    whole = read_trace(file)
    shrunk = whole.shrunk(16)
    first, second = (
        str(request.body(ENDPOINT, 1.0, "s", "own")["prompt"]).split() for request in shrunk.requests
    )
    assert len(first) == 100
    assert first[:64] == second[:64]
    assert first[64:70] != second[64:70]
    assert [request.output_length for request in shrunk.requests] == [1, 1]
    assert shrunk.shared == whole.shared


def result(*exchanges: Exchange, samples: list[Sample] | None = None) -> ReplayResult:
    """Return a replay of 50 s that began at 100, so that a window of the plot is one second."""
    arrivals = [(each.started - 100, ENDPOINT.body) for each in exchanges]
    found = ReplayResult(ENDPOINT, arrivals, Slo(), "trace", 60.0, samples or [])  # type: ignore[arg-type]
    found.run.exchanges = list(exchanges)
    found.run.began, found.run.ended = 100.0, 150.0
    return found


def exchange(at: float, ttft: float, cached: int | None = None) -> Exchange:
    """A finished request of 10 prompt tokens, sent `at` seconds after the start."""
    made = Exchange(started=100 + at, ended=100 + at + ttft + 0.1, prompt_tokens=10, cached_tokens=cached)
    made.arrivals = [made.started + ttft, made.started + ttft + 0.04]
    return made


def test_the_rate_of_requests_sent_at_once_is_over_the_whole_run() -> None:
    found = result(exchange(0.0, 0.1), exchange(0.0, 0.2))
    found.run.asks_until = found.run.began + found.seconds
    assert found.report().lead.endswith(": 0.04 requests/s.")


def test_the_plot_shows_each_figure_in_its_window_of_time() -> None:
    samples = [Sample(102.5, 8, 0.25, 0.0), Sample(130.5, 4, 0.5, 0.1)]
    report = result(exchange(0.5, 0.1, 5), exchange(20.5, 0.4, 10), samples=samples).report()
    plot = {str(name): (top, str(bars)) for name, top, bars in report.tables[1].rows}
    top, bars = plot["TTFT p50, ms"]
    assert top == pytest.approx(400)
    assert {place: bar for place, bar in enumerate(bars) if bar != " "} == {0: "▂", 20: "█"}
    assert plot["prefix hits, %"] == (100.0, "▄" + 19 * " " + "█" + 29 * " ")
    assert plot["queued prefills"][1].strip() == "█" + 27 * " " + "▄"
    assert plot["KV blocks in use, prefill, %"][0] == 10.0
    assert "Prefix hits: 75.0 % of the prompt tokens." in report.notes


def test_the_report_counts_all_requests_and_tells_what_is_unknown() -> None:
    failed = Exchange(started=101, ended=102, error="HTTP 500 no")
    late = exchange(30.0, 0.1)
    found = result(exchange(0.5, 0.9), failed, late)
    found.arrivals = [(0.5, ENDPOINT.body), (1.0, ENDPOINT.body), (29.0, ENDPOINT.body)]  # type: ignore[list-item]
    report = found.report(complete=False)
    assert report.lead.startswith("3 requests: 2 finished, 1 failed, 0 unfinished. 33.3 % kept the SLO")
    notes = " ".join(report.notes)
    assert (
        "The server does not report prefix hits: set `enable-prompt-tokens-details: true` in `Processor`"
        in notes
    )
    assert "Requests were sent late, by 1.00 s (p99)" in notes
    assert "1 requests failed: HTTP 500 no" in notes
    assert "queued prefills" not in {row[0] for row in report.tables[1].rows}


async def test_the_command_replays_a_trace_at_a_given_server(tmp_path: Path) -> None:
    file = trace_file(tmp_path, (0, 40, 8), (1000, 5000, 8), (2000, 80, 8))
    tiny = OpenAi(ttft=0.01, gap=0.01)
    words = f"replay {file} --speed 4 --shrink 2 --seed 1 --json found.json"
    async with tiny_server(tiny) as server:
        code, out, err = await bench(f"{words} --base-url {server.url}", tmp_path)
    assert code == 0, err
    requests = json.loads((tmp_path / "found.json").read_text())["data"]["requests"]
    assert [each["outcome"] for each in requests] == ["finished"] * 2
    assert requests[1]["sent"] - requests[0]["sent"] == pytest.approx(0.5, abs=0.3)
    assert [asked.body["max_tokens"] for asked in tiny.chats[-2:]] == [4, 4]
    assert "1 left out: without an answer, or too long" in out
    assert "Over time" in out
    assert "2 requests, about 0 s" in err


@pytest.mark.parametrize(("blocks", "found"), [(2, 32), (1, 16)])
def test_one_cache_finds_whole_blocks_and_drops_the_ends_of_prompts_first(blocks: int, found: int) -> None:
    assert one_cache([range(40), range(40)], blocks) == found / 80
