"""The long soak: what counts as growth or failure, which requests a round sends, and one round of each form."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.graphs.watch import Leftovers
from pdserve_bench.measure.runs import LoadRun, OpenLoop
from pdserve_bench.measure.trace import Trace, TraceRequest
from pdserve_bench.soak.forms import FORMS, RESTARTED, harm
from pdserve_bench.soak.requests import Ending, MixedLoad
from pdserve_bench.soak.rounds import ROUND, SoakRounds, Traffic
from pdserve_bench.soak.usage import Usage, UsageSnapshot

from tests.bench.answers import fixed, tiny_server, whole
from tests.network import hosts

IDLE = Usage(blocks=0, sockets=9, files=20, tasks=20, threads=15, MiB=600)
ETCD = Usage(sockets=9, files=20, threads=15, MiB=100, kept=11, disk=124)
IDLE_GRAPH = Leftovers({}, 0, 0.1)
SAMPLES = 20


def series(**growth: float) -> list[UsageSnapshot]:
    """Return samples. From one to the next, each count of `frontend-0` rises by its value in `growth`."""
    return [
        {
            "frontend-0": replace(
                IDLE, **{what: getattr(IDLE, what) + int(step * number) for what, step in growth.items()}
            ),
            "etcd": ETCD,
        }
        for number in range(SAMPLES)
    ]


@pytest.mark.parametrize(
    ("growth", "found"),
    [
        ({}, []),
        ({"sockets": 1}, ["frontend-0: sockets 16 -> 26"]),
        ({"files": 0.5, "tasks": 1}, ["frontend-0: files 23 -> 28", "frontend-0: tasks 27 -> 37"]),
        ({"MiB": 3}, ["frontend-0: MiB 621 -> 651"]),
        ({"MiB": 1}, []),
    ],
)
def test_a_count_that_grows_from_round_to_round_is_a_leak(growth: dict[str, float], found: list[str]) -> None:
    assert SoakRounds(series(**growth)).problems == found


def test_growth_in_the_first_rounds_and_a_single_peak_are_no_leaks() -> None:
    samples = series()
    early = [{**sample, "frontend-0": replace(IDLE, MiB=300, sockets=1)} for sample in samples[:5]]
    peak = {**samples[0], "frontend-0": replace(IDLE, sockets=90)}
    assert SoakRounds([*early, *samples[5:-1], peak]).problems == []


def test_lost_processes_and_growing_stored_data_are_problems() -> None:
    samples = series()
    kept: list[UsageSnapshot] = [
        {**sample, "etcd": replace(ETCD, kept=11 + n)} for n, sample in enumerate(samples)
    ]
    assert SoakRounds(kept).problems == ["etcd: kept 18 -> 28"]
    lost = [{"etcd": ETCD}] * 6
    assert SoakRounds([*samples[:-6], *lost]).problems == ["frontend-0 is gone"]
    assert SoakRounds().problems == ["nothing was measured"]


async def test_a_failed_request_is_a_problem() -> None:
    found = SoakRounds(series())
    async with tiny_server(fixed(whole({"error": {"message": "engine died"}}, 500))) as server:
        endpoint = Endpoint(server.url, "tiny")
        run, mixed = LoadRun(), MixedLoad(lambda: endpoint, (8, 20), 1)
        await OpenLoop([(0.0, lambda to: to.body("a", 2))] * 2, 0.1, 5).run(endpoint, run)
        await mixed._request(Ending.MIDWAY)
    found.add("round 0", run, mixed, IDLE_GRAPH)
    first, second = found.problems
    assert first == "round 0: 2 failed: HTTP 500 engine died"
    assert second.startswith("round 0: leaves mid-stream: ")


def test_what_an_idle_graph_holds_is_a_problem() -> None:
    found, mixed = SoakRounds(series()), MixedLoad(lambda: Endpoint("", ""), (8, 20), 1)
    held = Leftovers({"decode-0-a": 3}, 1, 60.0, ("missing: 1 decode",))
    found.add("round 0", LoadRun(exchanges=[]), mixed, held)
    assert [each.rpartition(": ")[2] for each in found.problems[:2]] == [
        "decode-0-a holds 3 KV blocks",
        "1 prefills are queued",
    ]
    assert len(found.problems) == 3


def test_each_part_ends_in_both_ways_but_frontends_are_never_killed() -> None:
    ways = {harm(turn) for turn in range(2 * len(RESTARTED))}
    assert ways == {(name, SIGTERM) for name in RESTARTED} | {
        (name, SIGKILL) for name in RESTARTED if not name.startswith("frontend")
    }


def test_rounds_replay_the_whole_trace_and_then_again_with_other_prompts() -> None:
    requests = [TraceRequest(40 + n, 4, timestamp=1000.0 * n, hash_ids=[n]) for n in range(100)]
    traffic = Traffic(Prompts(2.0, 1), Trace("t", tuple(requests), 1.0), speed=1.0, seed=5)
    sent = []
    for number in range(10):
        workload = traffic.round(number)
        assert isinstance(workload, OpenLoop)
        assert all(0 <= due < ROUND for due, _ in workload.requests)
        sent.append([make(Endpoint("", "t"))["prompt"] for _, make in workload.requests])
    first = [prompt for each in sent[:5] for prompt in each]
    assert [len(each) for each in sent[:5]] == [20] * 5
    assert len(set(first)) == 100
    assert not set(first) & {prompt for each in sent[5:] for prompt in each}


ONE_ROUND = """
import asyncio, pickle, sys
from pathlib import Path
from pdserve_bench.soak import rounds

rounds.ROUND, rounds.RESTART_AFTER = 6.0, 1.0
form, folder = sys.argv[1], Path(sys.argv[2])
found = asyncio.run(rounds.soak_rounds(form, 0.001, None, 1.0, 1, folder))
(folder / "found").write_bytes(pickle.dumps(found))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", FORMS)
def test_a_round_of_each_form_has_no_problems(form: str, tmp_path: Path) -> None:
    """A round has its own process, because gRPC's threads stay in the network namespace in which they started."""
    if form == "pods":
        with hosts(tmp_path / "try"):
            pass  # skips the test where hosts are not permitted
    words = [sys.executable, "-c", ONE_ROUND, form, str(tmp_path)]
    subprocess.run(
        words, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=True, timeout=500
    )
    found: SoakRounds = pickle.loads((tmp_path / "found").read_bytes())
    assert found.problems == []
    (sample,) = found.samples
    roles = {f"{role}-{number}" for role in ("frontend", "decode", "prefill") for number in (0, 1)}
    assert sample.keys() >= {*roles, "nats", "etcd"}
    assert sample["etcd"].kept
    assert sample["nats"].disk is not None
    assert found.done["restarts of decode-1 by SIGTERM"] == 1
    assert found.done["of the traffic, finished"] > 5
