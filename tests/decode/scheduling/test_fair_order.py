"""The order of what waits: round the clients, and with a promise the earliest first. Pure."""

import math
from itertools import count
from random import Random

import pytest

from pdserve.decode.scheduling.fair_order import LATE, PASSED, FairOrder, Waiting, rank

INF = math.inf


def in_order(waiting: list[tuple[str, float]], now: float = 0.0, needs: float = 0.1) -> list[str]:
    """The clients of these, each due at a time, as they have their turns."""
    order: FairOrder[tuple[str, int]] = FairOrder()
    numbers = count()
    for client, due in waiting:
        order.add(client, (client, next(numbers)), due, needs)
    served = []
    while len(order):
        assert order.first(now) is not None
        client, number = order.pop(now)
        served.append(f"{client}{number}")
    return served


@pytest.mark.parametrize(
    ("waiting", "served"),
    [
        pytest.param([("a", INF), ("a", INF), ("b", INF), ("a", INF)], "a0 b2 a1 a3", id="no promise"),
        pytest.param([("a", 3), ("a", 2), ("a", 1)], "a2 a1 a0", id="the earliest first"),
        pytest.param([("a", 3), ("b", 2), ("c", 1)], "c2 b1 a0", id="of all clients"),
        pytest.param([("a", 3), ("b", 1), ("b", 2)], "b1 a0 b2", id="but no client twice before another"),
        pytest.param([("a", 0.05), ("a", 3)], "a1 a0", id="what is late waits behind"),
        pytest.param([("a", 0.05 - LATE), ("a", 3)], "a0 a1", id="not for ever"),
        pytest.param([("a", INF), ("a", 3)], "a1 a0", id="nothing promised"),
        pytest.param([("~a", INF), ("b", INF), ("b", INF)], "b1 b2 ~a0", id="spare"),
        pytest.param(
            [("~a", 1), ("~a", INF), ("b", 3), ("b", INF)], "b2 b3 ~a0 ~a1", id="spare with promises"
        ),
    ],
)
def test_the_order(waiting: list[tuple[str, float]], served: str) -> None:
    assert in_order(waiting) == served.split()


@pytest.mark.parametrize("due", [math.inf, 50.0])
def test_the_next_of_many_is_found_without_a_look_at_each(
    due: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, ranked = FairOrder[int](), count(1)
    monkeypatch.setattr(
        Waiting, "rank", lambda waiting, now: next(ranked) and rank(waiting.due, waiting.needs, now)
    )
    for number in range(400):
        order.add(f"{number % 4}", number, due + number)
        order.first(0.0)
    before = next(ranked)
    assert order.first(1.0) == order.pop(2.0) == 0
    assert next(ranked) - before <= 400 / 4


@pytest.mark.parametrize("seed", range(20))
def test_what_is_remembered_of_ranks_changes_no_turn(seed: int) -> None:
    """Nor has what is removed a turn."""
    random, order, forgetful, left = Random(seed), FairOrder[int](), FairOrder[int](), dict[int, str]()
    for now in range(300):
        left[now], due = random.choice("ab"), random.choice([INF, now + random.uniform(0.0, 30.0)])
        for each in (order, forgetful):
            each.add(left[now], now, due, now % 5)
        if now % 3 == 0:
            gone = random.choice([*left])
            for each in (order, forgetful):
                each.remove(left[gone], gone)
            del left[gone]
        if left and now % 2:
            forgetful._ranked.clear()
            found = order.pop(now)
            assert found == forgetful.pop(now)
            del left[found]
    assert sorted(order) == sorted(left)


def test_clients_that_come_and_go_pass_no_other_for_ever() -> None:
    order: FairOrder[str] = FairOrder()
    order.add("patient", "patient", due=9.0)
    order.add("patient", "again", due=9.0)
    passed = 0
    for number in count():
        order.add(f"new {number}", "new", due=1.0)
        if order.pop(0.0) != "new":
            break
        passed += 1
    assert passed <= 2 * PASSED + 1


def test_a_client_that_comes_later_has_no_more_turns_for_spare_ones_that_had_none() -> None:
    order: FairOrder[str] = FairOrder()
    order.add("~spare", "~")
    for _ in range(20):
        order.add("a", "a", due=1000.0)
    for _ in range(10):
        order.pop(0.0)
    for _ in range(4):
        order.add("b", "b", due=1001.0)
    assert "".join(order.pop(0.0) for _ in range(8)) == "abababab"


def test_what_has_no_promise_waits_for_a_bounded_time_behind_what_its_client_sends_later() -> None:
    """As a request on its way to its next token does, where only the first one is promised."""
    order: FairOrder[str] = FairOrder()
    order.add("a", "without", needs=0.1)
    now = 0.0
    for _ in range(100):
        order.add("a", "with", due=now + 1.0, needs=0.1)
        if order.pop(now) == "without":
            break
        now += 1.0
    assert now <= LATE + 1.0


@pytest.mark.parametrize(
    ("waiting", "after"),
    [
        ("a b b b", 1),
        ("~a ~a b", 0),
        ("b b b ~b ~b", 2),
    ],
)
def test_how_many_have_their_turn_after_a_new_one(waiting: str, after: int) -> None:
    order: FairOrder[object] = FairOrder()
    for each in waiting.split():
        order.add(each, object())
    assert order.after("a") == after
