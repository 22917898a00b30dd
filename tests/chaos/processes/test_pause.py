"""A process's monotonic clock is set back, as if it had stood still. The process still waits as long as asked."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pdserve_bench.chaos.processes.pause import stand_still, stoppable

HOUR = 3600 * 10**9
TOLD = """
import threading, time
for _ in iter(input, ""):
    before = time.monotonic()
    threading.Event().wait(0.2)
    time.sleep(0.2)
    print(before, time.monotonic(), flush=True)
"""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture
def clocks(tmp_path: Path) -> Path:
    return tmp_path / "clocks"


@pytest.fixture
def two(clocks: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    variables = {**os.environ, **stoppable(clocks)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", TOLD]
    two = [
        subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, text=True, process_group=0)
        for _ in range(2)
    ]
    yield two
    for process in two:
        process.kill()
        process.communicate()


def told(process: "subprocess.Popen[str]") -> tuple[float, float]:
    """Return the process's clock before and after a wait of 0.4 s."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("?\n")
    process.stdin.flush()
    before, after = map(float, process.stdout.readline().split())
    return before, after


def test_one_clock_is_set_back_and_another_is_not(two: list["subprocess.Popen[str]"], clocks: Path) -> None:
    stopped, other = two
    first = told(stopped)[1], told(other)[1]
    assert stand_still(clocks, [stopped.pid], HOUR) == 1
    before, after = told(stopped)
    assert before < first[0] - 3000
    assert after >= before + 0.4
    assert stand_still(clocks, [stopped.pid], HOUR) == 1
    assert told(stopped)[0] < before - 3000
    assert told(other)[0] > first[1]
