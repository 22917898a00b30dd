"""`pdserve compare` as a user runs it, with simulated engines; nothing depends on the machine's speed."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pdserve_bench.compare.recommend import CandidateResult, Criteria, recommend
from pdserve_bench.graphs.launch import PDSERVE
from pdserve_bench.graphs.simulated import simulated, write
from pdserve_bench.measure.slo import Slo

from tests.conditions import until
from tests.serving import processes_below

WITHIN = 400
"""Seconds until a run counts as hung."""


@contextmanager
def running(folder: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a comparison. On exit, check that it left no process and no file."""
    file = write(simulated({"step-seconds": 0.01, "prefill-rate": 10_000}), folder / "graph.yaml")
    (folder / "tmp").mkdir()
    command = [*PDSERVE, "compare", "-f", str(file), *options, "--json", str(folder / "found.json")]
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(WITHIN)
    assert processes_below(folder) == []
    assert list((folder / "tmp").glob("pdserve-*")) == []


def compared(folder: Path, load_: str) -> Any:
    """Return the report of a short comparison."""
    with running(folder, *load_.split(), "--minutes", "0.2") as process:
        said, _ = process.communicate(timeout=WITHIN)
    assert process.returncode == 0, said[-5000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.timeout(2 * WITHIN)
def test_the_verdict_follows_from_its_results(tmp_path: Path) -> None:
    load_ = "--prompt-tokens 200 --answer-len 8 --ttft 2s --gap 1s --share 0.5 --rate 4"
    report = compared(tmp_path, load_)
    assert report["complete"]
    data = report["data"]
    results = msgspec.convert(data["results"], list[CandidateResult])
    criteria = Criteria(Slo(2.0, 1.0), 0.5, 4.0, data["noise"], data["foreign"])
    again = recommend(results, criteria)
    assert (data["verdict"], data["doubts"]) == (again.verdict.value, list(again.doubts))
    assert data["choice"] == (again.choice.name if again.choice else None)
    assert again.reason in report["lead"]
    assert {result.name for result in results} >= {"aggregated: 2 engines, batch 128", "1 prefill + 1 decode"}
    assert any(result.probed for result in results)


@pytest.mark.timeout(2 * WITHIN)
def test_numbers_of_clients_are_measured_side_by_side(tmp_path: Path) -> None:
    load_ = "--prompt-tokens 200 --answer-len 8 --clients 1,4"
    report = compared(tmp_path, load_)
    found = {(each["clients"], each["system"]): each for each in report["data"]["figures"]}
    systems = "1 prefill + 1 decode", "aggregated: 2 engines, batch 128"
    assert found.keys() == {(count, system) for count in (1, 4) for system in systems}
    for (count, _), each in found.items():
        assert each["failed"] == 0
        assert each["finished"] == each["requests"] >= 4 * count, "four turns with all clients"
        assert each["TTFT p50"] < each["whole p50"]
    assert report["lead"].count("clients:") == 2


@pytest.mark.timeout(2 * WITHIN)
def test_ctrl_c_while_a_graph_starts_stops_the_graph(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        asyncio.run(until(lambda: bool(processes_below(tmp_path)), within=WITHIN))
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=WITHIN)
    assert process.returncode == 130, said[-5000:]
    assert "Broken off before anything was measured." in said
