"""Flex requests in admission control: they get slots for which no other request waits."""

import pytest

from pdserve.config.schema import AdmissionLimits
from pdserve.frontend.admission.wait_estimate import RequestSize
from pdserve.util.errors import Overloaded
from tests.frontend.admission.test_admission import Model, clients, full


def test_flex_requests_start_only_while_no_other_request_waits() -> None:
    model = full()
    waiting = [
        model.ask("batch", is_flex=True),
        model.ask("b"),
        model.ask("other", is_flex=True),
        model.ask("b"),
    ]
    assert model.serve(waiting) == ["b", "b", "batch", "other"]


def test_flex_requests_may_have_every_slot_until_another_request_comes() -> None:
    model = Model(4, pauses=True)
    first = model.streams("batch", 4, is_flex=True)
    model.take(model.ask("a"), model.ask("a"), model.ask("a"))
    assert clients(model) == "aaab"
    assert not model.ask("a").waiting  # the last flex sequence pauses too
    assert model.paused == first[::-1]
    for _ in range(3):
        model.end(next(permit for permit in model.running if permit.admission.client == "a"))
    assert clients(model) == "bbb"


def test_flex_requests_that_cannot_pause_leave_room_for_other_requests() -> None:
    model = Model(8, AdmissionLimits(max_waiting=2), pauses=True)
    for _ in range(10):
        model.sequence(model.ask("batch", is_flex=True), can_pause=False)
    with pytest.raises(Overloaded, match="too many requests are running"):
        model.ask("batch", is_flex=True)
    assert not model.ask("a").waiting


def test_flex_requests_preempt_only_each_other() -> None:
    model = Model(4, pauses=True)
    permits = model.streams("greedy", 4)
    permits[0].admission.set_unread(True)
    assert not model.streams("batch", 1, is_flex=True)
    assert not model.paused
    model = Model(4, pauses=True)
    model.streams("many", 8, is_flex=True)
    assert model.streams("other", 1, is_flex=True)


@pytest.mark.parametrize("can_pause", [True, False])
def test_only_flex_requests_pause_for_requests_that_wait_at_a_worker(can_pause: bool) -> None:
    model = Model(8, pauses=True)
    flex = model.sequence(model.ask("batch", is_flex=True), can_pause=can_pause)
    model.streams("a", 4)
    model.control.yield_slots(3, dict.fromkeys(model.running, False))
    assert model.paused == ([flex] if can_pause else [])


@pytest.mark.parametrize(
    ("slots", "ordinary", "run"), [(1, 0, 1), (2, 0, 1), (8, 0, 2), (16, 0, 4), (8, 5, 1), (8, 6, 0)]
)
def test_flex_sequences_that_cannot_pause_leave_slots_to_ordinary_ones(
    slots: int, ordinary: int, run: int
) -> None:
    model = Model(slots, pauses=True)
    model.streams("a", ordinary)
    for number in range(slots):
        model.sequence(model.ask(f"batch {number}", is_flex=True), can_pause=False)
    assert clients(model).count("b") == run
    model.streams("a", slots - ordinary - run)
    assert len(model.running) == slots


def test_an_admitted_flex_request_waits_for_ordinary_ones_before_it_begins() -> None:
    model = Model(1, pauses=True)
    flex = model.ask("batch", is_flex=True)
    other = model.ask("a")
    assert (flex.waiting, other.waiting) == (False, True)
    model.sequence(flex)
    assert not other.waiting
    model.take(other)
    assert clients(model) == "a"


def test_flex_requests_do_not_count_in_the_queue_of_others() -> None:
    model = full()
    model.estimate.record(0, ttft=10.0, decode_seconds=0.0)
    for _ in range(10):
        model.ask("batch", is_flex=True)
    assert len(model.control) == 0
    assert model.ask("a", left=40.0).waiting
    assert model.ask("batch", left=5.0, is_flex=True).waiting  # a flex request may wait in vain
    assert model.control.requests == 13


@pytest.mark.parametrize("limits", [AdmissionLimits(max_waiting=2), AdmissionLimits(max_waiting_tokens=250)])
def test_a_full_queue_refuses_flex_requests_first(limits: AdmissionLimits) -> None:
    model = full(1, limits)
    flex, others = model.ask("batch", is_flex=True), [model.ask("a"), model.ask("a")]
    assert not flex.waiting
    assert all(other.waiting for other in others)


def test_flex_requests_that_have_paused_do_not_fill_the_queue() -> None:
    model = Model(2, AdmissionLimits(max_waiting_tokens=300), pauses=True)
    model.take(*[model.ask("batch", RequestSize(399, 0), is_flex=True) for _ in range(2)])
    model.take(model.ask("a"), model.ask("b"))
    assert len(model.paused) == 2
    assert all(model.ask(client).waiting for client in "cd")
