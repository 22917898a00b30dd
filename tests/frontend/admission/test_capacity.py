from dataclasses import dataclass, field

import pytest

from pdserve.contract.messages import Load
from pdserve.contract.records import Instance, Role
from pdserve.frontend.admission.capacity import Capacity, worker_capacity


@dataclass
class Requests:
    requests: int = 0
    tokens: float = 0.0
    starting: bool = False
    load: Load = field(default_factory=Load)


def decode_worker(*, at_once: int = 8, kv: int = 1000) -> Instance:
    return Instance("a", Role.DECODE, max_num_seqs=at_once, kv_tokens=kv)


@pytest.mark.parametrize(
    ("worker", "ours", "frontends", "expected"),
    [
        (decode_worker(), Requests(), 1, Capacity(8, 8, 1000)),
        (decode_worker(), Requests(4, 300), 1, Capacity(8, 4, 700)),
        (decode_worker(), Requests(15, 300), 1, Capacity(8, 0, 700)),
        (decode_worker(at_once=0), Requests(), 1, Capacity(256, 256, 1000)),
        (decode_worker(kv=0), Requests(1, 10**9), 1, Capacity(8, 7, float("inf"))),
        (Instance("a", Role.DECODE, draining=True), Requests(), 1, Capacity()),
        # one more for each request in remote prefill, up to a quarter of the slots (at least one)
        (decode_worker(), Requests(8, load=Load(waiting=1, remote=1)), 1, Capacity(8, 1, 1000)),
        (decode_worker(), Requests(8, load=Load(waiting=8, remote=8)), 1, Capacity(8, 2, 1000)),
        (decode_worker(at_once=1), Requests(1, load=Load(waiting=1, remote=1)), 1, Capacity(1, 1, 1000)),
        # The requests' tokens exceed the cache, but prefixes may be shared: one more is tried if all have a token.
        (decode_worker(), Requests(4, 1100, load=Load(kv_usage=0.5)), 1, Capacity(8, 4, 1)),
        (decode_worker(), Requests(4, 1100, starting=True, load=Load(kv_usage=0.5)), 1, Capacity(8, 4, 0)),
        (decode_worker(), Requests(4, 1100, load=Load(kv_usage=0.95)), 1, Capacity(8, 4, 0)),
        # with one frontend, the worker's report of running requests does not count (it may be old)
        (decode_worker(), Requests(2, 0, load=Load(running=10)), 1, Capacity(8, 6, 1000)),
        # several frontends: each gets an equal part, or more if the others leave theirs unused
        (decode_worker(), Requests(load=Load(running=0)), 2, Capacity(8, 8, 500)),
        (decode_worker(), Requests(2, load=Load(running=4)), 2, Capacity(8, 4, 500)),
        (decode_worker(), Requests(2, load=Load(running=30)), 2, Capacity(8, 2, 500)),
        (decode_worker(at_once=1), Requests(load=Load(running=2)), 4, Capacity(1, 1, 250)),
    ],
)
def test_capacity(worker: Instance, ours: Requests, frontends: int, expected: Capacity) -> None:
    assert worker_capacity(worker, ours, frontends) == expected
