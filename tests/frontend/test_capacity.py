from dataclasses import dataclass

import pytest

from pdserve.frontend.admission.capacity import Capacity, total_capacity, worker_capacity
from pdserve.records import Instance, Load, Role


@dataclass
class Requests:
    requests: int = 0
    tokens: float = 0.0
    starting: bool = False


def decode_worker(*, at_once: int = 8, kv: int = 1000, there: int = 0, usage: float = 0.0) -> Instance:
    load = Load(running=there, kv_usage=usage)
    return Instance("a", Role.DECODE, max_num_seqs=at_once, kv_tokens=kv, load=load)


@pytest.mark.parametrize(
    ("worker", "ours", "frontends", "expected"),
    [
        (decode_worker(), Requests(), 1, Capacity(10, 10, 1000)),
        (decode_worker(), Requests(4, 300), 1, Capacity(10, 6, 700)),
        (decode_worker(), Requests(10, 300), 1, Capacity(10, 0, 700)),
        (decode_worker(), Requests(15, 300), 1, Capacity(10, 0, 700)),
        (decode_worker(at_once=1), Requests(1), 1, Capacity(2, 1, 1000)),
        (decode_worker(at_once=0), Requests(), 1, Capacity(320, 320, 1000)),
        (decode_worker(kv=0), Requests(1, 10**9), 1, Capacity(10, 9, float("inf"))),
        # more than adds up may fit, where prefixes are shared: one at a time, while there is space
        (decode_worker(usage=0.5), Requests(4, 1100), 1, Capacity(10, 6, 1)),
        (decode_worker(usage=0.5), Requests(4, 1100, starting=True), 1, Capacity(10, 6, 0)),
        (decode_worker(usage=0.95), Requests(4, 1100), 1, Capacity(10, 6, 0)),
        # a worker's report is older than this frontend's own count
        (decode_worker(there=10), Requests(2, 0), 1, Capacity(10, 8, 1000)),
        # several frontends: an equal part, or what the others leave
        (decode_worker(there=0), Requests(), 2, Capacity(10, 10, 500)),
        (decode_worker(there=6), Requests(2), 2, Capacity(10, 4, 500)),
        (decode_worker(there=30), Requests(2), 2, Capacity(10, 3, 500)),
        (decode_worker(there=30), Requests(5), 2, Capacity(10, 0, 500)),
        (decode_worker(at_once=1, there=2), Requests(), 4, Capacity(2, 1, 250)),
    ],
)
def test_capacity(worker: Instance, ours: Requests, frontends: int, expected: Capacity) -> None:
    assert worker_capacity(worker, ours, frontends) == expected


def test_a_draining_worker_has_no_capacity() -> None:
    assert worker_capacity(Instance("a", Role.DECODE, draining=True), Requests(), 1) == Capacity()


def test_only_available_workers_add_up() -> None:
    capacities = [Capacity(10, 3, 100), Capacity(10, 5, 0), Capacity(10, 0, 900)]
    assert total_capacity(capacities) == Capacity(30, 3, 100)
    assert total_capacity([]) == Capacity()
