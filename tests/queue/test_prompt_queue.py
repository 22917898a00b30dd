"""The fair queue of prompts: round-robin over clients; late requests after others, flex requests last."""

import math
from itertools import count

import pytest

from pdserve.queue.prompt_queue import MAX_LATE, PromptQueue

INF = math.inf


def in_order(waiting: list[tuple[str, float]], now: float = 0.0, needs: float = 0.1) -> list[str]:
    """Queue a request for each (client, deadline); return the clients, numbered, in the order of their turns."""
    queue: PromptQueue[str] = PromptQueue()
    for number, (client, due) in enumerate(waiting):
        queue.add(client, f"{client}{number}", due, needs)
    served = []
    while (first := queue.first(now)) is not None:
        assert queue.pop(now) == first
        served.append(first)
    assert len(queue) == 0
    return served


@pytest.mark.parametrize(
    ("waiting", "served"),
    [
        pytest.param([("a", INF), ("a", INF), ("b", INF), ("a", INF)], "a0 b2 a1 a3", id="round-robin"),
        pytest.param([("a", 3), ("a", 2), ("b", 1)], "a0 b2 a1", id="FIFO also with deadlines"),
        pytest.param([("a", 0.05), ("a", 3)], "a1 a0", id="a late request lets its client's others pass"),
        pytest.param([("a", 0.05), ("b", 3)], "b1 a0", id="a late request lets other clients pass"),
        pytest.param(
            [("a", 0.05), ("a", INF)], "a1 a0", id="a late request lets requests without a deadline pass"
        ),
        pytest.param([("a", -MAX_LATE), ("a", 3)], "a0 a1", id="after `MAX_LATE` it lets none pass"),
        pytest.param([("a", 0.05), ("b", 0.01), ("a", 0.02)], "a0 b1 a2", id="all are late"),
        pytest.param([("~a", INF), ("b", INF), ("b", INF)], "b1 b2 ~a0", id="flex requests last"),
        pytest.param([("~a", 1), ("b", 0.05), ("b", INF)], "b2 b1 ~a0", id="flex requests after late ones"),
    ],
)
def test_the_order_of_turns(waiting: list[tuple[str, float]], served: str) -> None:
    assert in_order(waiting) == served.split()


def test_new_clients_do_not_starve_an_older_client() -> None:
    queue: PromptQueue[str] = PromptQueue()
    queue.add("patient", "first")
    queue.add("patient", "second")
    for number in count():
        queue.add(f"new {number}", "new")
        if queue.pop(0.0) == "second":
            break
    assert number <= 3


def test_a_late_request_waits_for_a_bounded_time() -> None:
    queue: PromptQueue[str] = PromptQueue()
    queue.add("a", "late", due=0.0, needs=0.1)
    now = 0.05
    while True:
        queue.add("a", "new", due=now + 1.0, needs=0.1)
        if queue.pop(now) == "late":
            break
        now += 1.0
    assert now <= MAX_LATE + 1.0


def test_a_removed_request_has_no_turn() -> None:
    queue: PromptQueue[str] = PromptQueue()
    for item in ("a0", "a1", "b0"):
        queue.add(item[0], item)
    for item in ("a0", "b0", "c0"):
        queue.remove(item[0], item)
    assert [*queue] == ["a1"]
    queue.remove("a", "a1")
    assert queue.first(0.0) is None


@pytest.mark.parametrize(
    ("waiting", "behind"),
    [
        ("a b b b", 1),
        ("~a ~a b", 0),
        ("b b b ~b ~b", 2),
    ],
)
def test_number_of_requests_behind_a_new_one(waiting: str, behind: int) -> None:
    queue: PromptQueue[object] = PromptQueue()
    for each in waiting.split():
        queue.add(each, object())
    assert queue.behind("a") == behind
