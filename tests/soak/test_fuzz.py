"""The short form of `python -m pdserve_bench.fuzz`: real processes, NATS and etcd, with simulated engines."""

import json
from pathlib import Path

from pdserve_bench.fuzz.__main__ import SIMULATED, Fuzzer
from pdserve_bench.fuzz.bodies import INTEGERS, make
from pdserve_bench.launch import started
from pdserve_bench.simulated import write

BODIES = 400


def test_a_body_is_the_same_each_time_and_no_two_are() -> None:
    bodies = [make(1, number, "demo") for number in range(BODIES)]
    assert bodies == [make(1, number, "demo") for number in range(BODIES)]
    assert len({body.raw for body in bodies}) > 0.9 * BODIES
    assert bodies != [make(2, number, "demo") for number in range(BODIES)]


def test_integers_over_64_bits_are_in_all_kinds_of_fields() -> None:
    bodies = [make(1, number, "demo").raw.decode(errors="replace") for number in range(3000)]
    huge = [text for text in bodies if any(str(value) in text for value in INTEGERS[:4])]
    for field in ("seed", "enum", "const", "minimum", "max_pattern_size", "logit_bias", "stop_token_ids"):
        assert any(f'"{field}"' in text for text in huge), field


async def test_bodies_of_every_shape_leave_nothing(tmp_path: Path) -> None:
    """No 5xx, nothing in flight, no block held, no place taken."""
    file = write(SIMULATED, tmp_path / "sim.yaml")
    async with started(file, tmp_path, print) as running:
        report = await Fuzzer(running.graph, seed=3).run(range(BODIES))
    assert report.problems == []
    assert sum(report.statuses.values()) == BODIES
    assert report.statuses["200"] > 50, json.dumps(report.statuses)
    assert report.statuses["400"] > 50
