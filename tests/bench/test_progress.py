"""Progress in a terminal and in a log, by programs of a few lines that go through phases."""

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from pdserve_bench.progress import Schedule, duration

from tests.terminal import Terminal

HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"
"""what a terminal is told about its cursor"""


def program(text: str) -> list[str]:
    """Ctrl-C reaches it also where the tests run in a shell's background."""
    begin = """
import signal, sys, time
from pdserve_bench.progress import Schedule
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
    return [sys.executable, "-c", begin + textwrap.dedent(text)]


def lines_of(text: str) -> list[str]:
    """What it says in a log, without the times of day."""
    found = subprocess.run(program(text), capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout in ("", "a result\n")
    lines = found.stderr.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d  ", line) for line in lines), lines
    return [line[10:] for line in lines]


def test_a_log_has_a_line_for_each_phase() -> None:
    found = lines_of("""
        with Schedule({"start": 40, "measure": 80}) as schedule:
            with schedule.phase("start"):
                print("a result")
            schedule.announce("once more", 60)
            with schedule.phase("measure"):
                schedule.say("[b]12 req/s[/b]")
            schedule.cancel("once more")
            with schedule.phase("unannounced"):
                pass
    """)
    assert found == ["start (2 min left)", "measure (2 min left)", "[b]12 req/s[/b]", "unannounced"]


def test_time_left_counts_what_is_announced_and_is_never_below_0() -> None:
    schedule = Schedule({"a": 10, "b": 20})
    assert schedule.seconds_left == 30
    schedule.announce("b", 5)
    schedule.announce("c", 5)
    schedule.cancel("c")
    schedule.cancel("never announced")
    with schedule.phase("a"):
        assert 25 <= schedule.seconds_left <= 35
    assert schedule.seconds_left == 25
    with schedule.phase("b"):
        pass
    with schedule.phase("not announced", 0.01):
        time.sleep(0.05)
        assert schedule.seconds_left == 0
    assert schedule.seconds_left == 0


def test_phases_are_one_at_a_time() -> None:
    schedule = Schedule({"a": 1, "b": 2})
    with (
        schedule.phase("a"),
        pytest.raises(RuntimeError, match="'b' begins while 'a' runs"),
        schedule.phase("b"),
    ):
        pass
    assert schedule.seconds_left == 2, "the one that was refused is still to come"
    with schedule.phase("b"):
        pass


RUN = """
    with Schedule({"first": 5, "second [/b]": 60}) as schedule:
        with schedule.phase("first"):
            pass
        schedule.say("a line that stays")
        with schedule.phase("second [/b]"):
            schedule.update("12 req/s [b]")
            for _ in range(SECONDS * 10):
                time.sleep(0.1)
        print("a result")
    print("the end")
"""


def test_a_terminal_has_a_line_that_moves_and_vanishes() -> None:
    """It leaves room for what Ctrl-C writes: in a line that is full that would begin another line, and the wrong one
    would be erased."""
    long = RUN.replace("SECONDS", "1").replace("12 req/s [b]", "12 req/s [b] " * 20)
    with Terminal(program(long), dict(os.environ)) as terminal:
        terminal.until("the exit code is 0")
    assert HIDDEN in terminal.text
    assert re.search(r"second \[/b\] \(\d+ s left\)  12 req/s \[b\]", terminal.text)
    after = terminal.text.rpartition("second [")[2]
    assert SHOWN in after
    assert "\x1b[2K" in after, "it is erased"
    assert "the end" in after
    lines = [line for line in re.split(r"[\r\n]+", terminal.text) if "second [" in line]
    drawn = [re.sub(r"\x1b\[[\d;?]*\w", "", line) for line in lines]
    assert any(line.endswith("…") for line in drawn)
    assert max(map(len, drawn)) <= 96


def test_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    with Terminal(program(RUN.replace("SECONDS", "60")), dict(os.environ)) as terminal:
        terminal.until("12 req/s")
        terminal.type("\x03")
        terminal.until("KeyboardInterrupt")
    after = terminal.text.rpartition("second [")[2]
    assert terminal.text.rindex(SHOWN) > terminal.text.rindex(HIDDEN)
    assert "\x1b[2K" in after


def test_results_go_to_their_file_beside_the_line_that_moves(tmp_path: Path) -> None:
    file = tmp_path / "out"
    command = ["bash", "-c", 'exec "$@" > "$0"', str(file), *program(RUN.replace("SECONDS", "1"))]
    with Terminal(command, dict(os.environ)) as terminal:
        terminal.until("the exit code is 0")
    assert file.read_text() == "a result\nthe end\n"
    assert "a line that stays" in terminal.text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (3600, "60 min"), (5400, "1 h 30 min"), (7260, "2 h 01 min")],
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
