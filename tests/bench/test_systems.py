"""`pdserve bench systems` as a user runs it, on simulated engines."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from pdserve_bench.simulated import simulated, write

from pdserve.cli import main
from tests.serving import processes_below

SPEED = {"step-seconds": 0.01, "prefill-rate": 10_000}
TINY = "--prompt-tokens 200 --output-tokens 8 --seconds 1.5 --no-screening --rounds 1"


class Benchmark:
    """A run in a folder of its own, in which nothing but its output is left where all went well."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        file = write(simulated(SPEED), folder / "sim.yaml")
        command = [
            sys.executable,
            "-m",
            "pdserve",
            "bench",
            "systems",
            "-f",
            str(file),
            *TINY.split(),
            *options,
        ]
        (folder / "tmp").mkdir()
        with (folder / "out").open("wb") as out, (folder / "log").open("wb") as log:
            environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "COLUMNS": "110"}
            self.process = subprocess.Popen(
                [*command, "--json", str(folder / "systems.json")], env=environment, stdout=out, stderr=log
            )

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "systems.json").read_text())
        return found

    def until(self, text: str) -> None:
        deadline = time.monotonic() + 180
        while text not in self.log:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.1)

    def left(self) -> list[psutil.Process]:
        """What still runs of it."""
        return processes_below(self.folder)


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Benchmark]:
    run = Benchmark(folder, *options)
    try:
        yield run
    finally:
        run.process.terminate()
        run.process.wait(120)


def test_a_whole_run(tmp_path: Path) -> None:
    with running(tmp_path, "--clients", "2") as run:
        assert run.process.wait(240) == 0, run.log + run.out
    report, data = run.report, run.report["data"]
    names = ["aggregated", "pdserve local", "pdserve remote", "pdserve"]
    assert report["complete"]
    assert [each["name"] for each in data["contestants"]] == names
    assert "2 simulated workers" in data["baseline"]["hardware"]
    turns = data["turns"]
    order = [(turn["system"], turn["control"]) for turn in turns]
    assert order == [*((name, False) for name in names), ("aggregated", True)]
    assert all(turn["complete"] and turn["load"] == "c=2" for turn in turns)
    assert sum(turn["outcomes"]["finished"] for turn in turns) > 20
    assert (data["outcomes"]["failed"], data["outcomes"]["unfinished"]) == (0, 0)
    remote = {turn["system"]: turn["figures"].get("remote prefills") for turn in turns}
    assert remote == {"aggregated": 0.0, "pdserve local": 0.0, "pdserve remote": 1.0, "pdserve": 1.0}
    processes = {"supervisor", "guardian", "nats-server", "etcd", "decode", "frontend"}
    for turn in turns:
        assert turn["figures"]["output tokens/s"] > 10
        assert turn["cpu"].keys() == processes | ({"prefill"} if turn["system"] != "aggregated" else set())
        assert all(turn["cpu"][name] > 0 for name in ("decode", "frontend"))
        assert turn["figures"]["TTFT p50"] > 200 / SPEED["prefill-rate"]
    for same in data["answers"].values():
        assert same == {"alone": 6, "alone_equal": 6, "together": 6, "together_equal": 6, "failed": 0}
    assert {"c=2", "Ratios to aggregated"} <= {table["title"].split(":")[0] for table in report["tables"]}
    assert "pdserve against aggregated. c=2: " in run.out
    assert "noise" in run.out
    assert run.left() == []
    assert list((run.folder / "tmp").glob("pdserve-*")) == []


def test_a_run_that_is_broken_off_while_a_graph_starts(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.until("starting aggregated")
        time.sleep(2)  # somewhere in its start
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(120) == 130, run.log
    assert "Broken off before anything was measured." in run.log
    assert run.left() == []
    assert list((run.folder / "tmp").glob("pdserve-*")) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--clients", "1,x"], "--clients 1,x: give whole numbers"),
        (["--batch", "0"], "--batch 0: give whole numbers"),
        (["--prompt-tokens", "5000"], "--prompt-tokens 5000: with the answer over max-model-len 4096"),
        (["--json", "/nowhere/systems.json"], "there is no folder /nowhere"),
        (["-f", "/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_a_wrong_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    """Is told at once, before anything starts."""
    file = write(simulated(), tmp_path / "sim.yaml")
    assert main(["bench", "systems", "-f", str(file), *options]) == 2
    assert expected in capsys.readouterr().err
