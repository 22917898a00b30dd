from dataclasses import dataclass

import pytest

from pdserve.frontend.admission.capacity import Room, room, total
from pdserve.messages import Instance, Load, Role


@dataclass
class Held:
    requests: int = 0
    tokens: float = 0.0
    starting: bool = False


def worker(*, at_once: int = 8, kv: int = 1000, there: int = 0, usage: float = 0.0) -> Instance:
    load = Load(running=there, kv_usage=usage)
    return Instance("a", Role.DECODE, max_num_seqs=at_once, kv_tokens=kv, load=load)


@pytest.mark.parametrize(
    ("one", "ours", "frontends", "expected"),
    [
        (worker(), Held(), 1, Room(10, 10, 1000)),
        (worker(), Held(4, 300), 1, Room(10, 6, 700)),
        (worker(), Held(10, 300), 1, Room(10, 0, 700)),
        (worker(), Held(15, 300), 1, Room(10, 0, 700)),
        (worker(at_once=1), Held(1), 1, Room(2, 1, 1000)),
        (worker(at_once=0), Held(), 1, Room(320, 320, 1000)),
        (worker(kv=0), Held(1, 10**9), 1, Room(10, 9, float("inf"))),
        # more than adds up may fit, where prefixes are shared: one at a time, while there is space
        (worker(usage=0.5), Held(4, 1100), 1, Room(10, 6, 1)),
        (worker(usage=0.5), Held(4, 1100, starting=True), 1, Room(10, 6, 0)),
        (worker(usage=0.95), Held(4, 1100), 1, Room(10, 6, 0)),
        # a report of one's own requests is older than one's own count
        (worker(there=10), Held(2, 0), 1, Room(10, 8, 1000)),
        # several frontends: an equal part, or what the others leave
        (worker(there=0), Held(), 2, Room(10, 10, 500)),
        (worker(there=6), Held(2), 2, Room(10, 4, 500)),
        (worker(there=30), Held(2), 2, Room(10, 3, 500)),
        (worker(there=30), Held(5), 2, Room(10, 0, 500)),
        (worker(at_once=1, there=2), Held(), 4, Room(2, 1, 250)),
    ],
)
def test_room(one: Instance, ours: Held, frontends: int, expected: Room) -> None:
    assert room(one, ours, frontends) == expected


def test_a_draining_worker_has_none() -> None:
    assert room(Instance("a", Role.DECODE, draining=True), Held(), 1) == Room()


def test_only_open_workers_add_up() -> None:
    rooms = [Room(10, 3, 100), Room(10, 5, 0), Room(10, 0, 900)]
    assert total(rooms) == Room(30, 3, 100)
    assert total([]) == Room()
