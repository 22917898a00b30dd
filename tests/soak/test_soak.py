"""The short form of `python -m pdserve_bench.soak`: real processes, NATS and etcd, with simulated engines."""

from pathlib import Path

import pytest
from pdserve_bench.launch import started
from pdserve_bench.simulated import write
from pdserve_bench.soak.__main__ import LENGTHS, SIMULATED, soak
from pdserve_bench.soak.requests import Ending
from pdserve_bench.soak.usage import Usage, leaks

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
        ({"decode-0": IDLE, "decode-0 child 0": IDLE}, ["decode-0 child 0 is new"]),
    ],
)
def test_what_counts_as_a_leak(after: dict[str, Usage], found: list[str]) -> None:
    assert leaks({"decode-0": IDLE}, after) == found


def test_blocks_that_were_held_before_are_leaked_too() -> None:
    held = {"decode-0": Usage(blocks=3)}
    assert leaks(held, held) == ["decode-0: blocks 0 -> 3"]


async def test_a_graph_is_where_it_was_after_requests_that_ended_in_every_way(tmp_path: Path) -> None:
    file = write(SIMULATED, tmp_path / "sim.yaml")
    async with started(file, tmp_path, print) as running:
        report = await soak(running.graph, 150, 600, LENGTHS["sim"], seed=7)
    assert report.problems == []
    assert sum(report.load.done.values()) == 600
    for ending in Ending:
        assert any(what.startswith(ending) for what in report.load.done), ending
