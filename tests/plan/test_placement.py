"""Which worker gets which GPUs."""

import math

import pytest

from pdserve.plan.slots import GpuRequest, place


def request(name: str, gpus: float, *pinned: int) -> GpuRequest:
    return GpuRequest(name, math.ceil(gpus), pinned, gpus if 0 < gpus < 1 else 1.0)


@pytest.mark.parametrize(
    ("requests", "gpus", "expected"),
    [
        pytest.param([("d", 2), ("p", 2)], [0, 1, 2, 3], [(0, 1), (2, 3)], id="the split on four cards"),
        pytest.param([("d", 1), ("e", 1), ("p", 2)], range(4), [(0,), (1,), (2, 3)], id="one, one and two"),
        pytest.param([("d", 0), ("p", 0)], [], [(), ()], id="the CPU"),
        pytest.param([("d", 2), ("p", 1)], [0, 2, 3], [(2, 3), (0,)], id="neighbours first"),
        pytest.param([("d", 2)], [0, 2, 4], [(0, 2)], id="any GPUs without neighbours"),
        pytest.param([("d", 2), ("p", 1, 0)], [0, 1, 2], [(1, 2), (0,)], id="around pinned GPUs"),
        pytest.param([("d", 1, 0), ("p", 1, 0)], [0], [(0,), (0,)], id="two pinned to one card"),
        pytest.param([("d", 0.3), ("e", 0.3), ("p", 0.4)], [2], [(2,)] * 3, id="three shares of a GPU"),
        pytest.param(
            [("d", 0.6), ("e", 1), ("p", 0.5)],
            range(3),
            [(0,), (1,), (2,)],
            id="too large to share",
        ),
        pytest.param([("d", 2, 3, 1)], range(4), [(3, 1)], id="pinned GPUs keep their order"),
    ],
)
def test_workers_are_placed_on_gpus(
    requests: list[tuple[str, float]], gpus: list[int], expected: list[tuple[int, ...]]
) -> None:
    found, problems = place([request(*wanted) for wanted in requests], gpus)
    assert problems == []
    assert list(found.values()) == expected


@pytest.mark.parametrize(
    ("requests", "gpus", "problem"),
    [
        ([("d", 2), ("p", 2)], [0, 1, 2], "The graph needs 4 GPUs (2 for d, 2 for p), found 3: "),
        ([("d", 1)], [], "The graph needs 1 GPU (1 for d), found 0: "),
        ([("d", 1, 5)], [0, 1], "gpu-ids asks for GPU 5, but this machine has 0, 1: "),
        ([("d", 1, 0), ("p", 1)], [0], "The graph needs 2 GPUs (1 for d, 1 for p), found 1: "),
    ],
)
def test_requests_without_enough_gpus_are_a_problem(
    requests: list[tuple[str, float]], gpus: list[int], problem: str
) -> None:
    found, (told,) = place([request(*wanted) for wanted in requests], gpus)
    assert told.startswith(problem)
    assert set(found) == {name for name, *_ in requests}
