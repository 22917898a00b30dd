"""Admission control without workers: the test sets the capacity."""

import asyncio
import time
from collections.abc import Callable

import pytest

from pdserve.config.schema import AdmissionLimits
from pdserve.frontend.admission.capacity import Capacity
from pdserve.frontend.admission.control import GROUP, AdmissionControl
from pdserve.frontend.admission.granted import Admission, SequencePermit
from pdserve.frontend.admission.wait_estimate import RequestEstimate, RequestSize
from pdserve.util.errors import BadRequest, Overloaded

SIZE = RequestSize(99, 0)  # 100 tokens
LIMITS = AdmissionLimits()


class Model:
    """Admission control of a model whose decode workers have `slots` slots."""

    def __init__(self, slots: int, limits: AdmissionLimits = LIMITS, *, pauses: bool = False) -> None:
        self.slots, self.tokens = slots, float("inf")
        self.running: list[SequencePermit] = []
        self.order: list[str] = []
        """clients of the sequences that began, in order"""
        self.paused: list[SequencePermit] = []
        """in the order in which they paused; stays empty unless `pauses`"""
        self.pauses = pauses
        self.estimate = RequestEstimate()
        self.control = AdmissionControl(limits, self.capacity, lambda: self.estimate)

    def capacity(self) -> Capacity:
        return Capacity(self.slots, self.slots - len(self.running), self.tokens)

    def ask(
        self, client: str, size: RequestSize = SIZE, left: float = 600.0, *, is_flex: bool = False
    ) -> Admission:
        return self.control.enter(client, size, time.monotonic() + left, is_flex=is_flex)

    def take(self, *admissions: Admission) -> None:
        """Request a permit for each sequence of these requests, as `RemoteCore` does."""
        for admission in admissions:
            for _ in range(admission.size.sequences):
                self.sequence(admission)

    def sequence(self, admission: Admission, *, can_pause: bool = True) -> SequencePermit:
        permit = admission.permit(
            lambda: self.begin(permit),
            lambda: permit.release(),
            lambda: self.pause(permit),
            can_pause=can_pause,
        )
        permit.request()
        return permit

    def pause(self, permit: SequencePermit) -> bool:
        if self.pauses:
            self.running.remove(permit)
            self.paused.append(permit)
            assert len(self.paused) < 1000, "clients preempt each other for ever"
        return self.pauses

    def refuses(self, client: str, left: float = 600.0) -> float:
        """Assert that a further request is refused, and return after how many seconds to retry it."""
        with pytest.raises(Overloaded) as caught:
            self.ask(client, left=left)
        return caught.value.retry_after

    def streams(
        self, client: str, count: int, *, can_pause: bool = True, is_flex: bool = False
    ) -> list[SequencePermit]:
        """Submit `count` requests for one sequence each. Return the permits of those that are admitted at once."""
        admissions = [self.ask(client, is_flex=is_flex) for _ in range(count)]
        return [
            self.sequence(admission, can_pause=can_pause) for admission in admissions if not admission.waiting
        ]

    def begin(self, permit: SequencePermit) -> None:
        self.running.append(permit)
        self.order.append(permit.admission.client)

    def end(self, permit: SequencePermit | None = None) -> None:
        """End this sequence or, if none is given, the first running one. A request ends with its last sequence."""
        permit = permit or self.running[0]
        self.running.remove(permit)
        permit.release()
        admission = permit.admission
        if admission.requested or any(running.admission is admission for running in self.running):
            self.control.advance()
        else:
            self.control.leave(admission)

    def serve(self, waiting: list[Admission]) -> list[str]:
        """Serve all of these requests, one after another. Return their clients in that order."""
        order = []
        while waiting:
            self.end()
            (admitted,) = [admission for admission in waiting if not admission.waiting]
            waiting.remove(admitted)
            self.take(admitted)
            order.append(admitted.client)
        return order


def full(slots: int = 1, limits: AdmissionLimits = LIMITS) -> Model:
    model = Model(slots, limits)
    for _ in range(slots):
        model.take(model.ask("early"))
    return model


def with_known_rate(limits: AdmissionLimits, seconds: float) -> Model:
    """Return a full model that has admitted 100 tokens every `seconds` for some time."""
    model = full(1, limits)
    rate = model.control._rate
    now = time.monotonic()
    rate.set_waiting(True, now - 100 * seconds)
    for step in range(100):
        rate.admitted(100, now - (100 - step) * seconds)
    rate.set_waiting(False, now)
    return model


def test_requests_are_admitted_while_slots_and_kv_tokens_are_free() -> None:
    model = Model(2)
    assert [model.ask("a").waiting for _ in range(3)] == [False, False, True], (
        "admitted requests count before they begin"
    )
    model = Model(8)
    model.tokens = 150.0  # a request needs 100: the second one may begin with the other 50
    assert [model.ask("a").waiting for _ in range(3)] == [False, False, True]


def test_turns_are_round_robin_without_credit_for_idle_time() -> None:
    model = full()
    model.serve([model.ask("a") for _ in range(10)])
    waiting = [model.ask(client) for client in "aaaabbc"]
    assert model.serve(waiting) == list("abcabaa")


def test_turns_are_fair_in_tokens() -> None:
    model = full()
    waiting = [model.ask("long", RequestSize(399, 0)) for _ in range(3)] + [
        model.ask("short") for _ in range(8)
    ]
    order = model.serve(waiting)
    assert order[:6].count("short") >= 4


def several(model: Model, client: str, sequences: int) -> Admission:
    model.estimate.record(100, 0.0, 0.0)
    admission = model.ask(client, RequestSize(0, 100, sequences, sequences))
    if not admission.waiting:
        model.take(admission)
    return admission


def test_a_client_is_charged_for_every_sequence() -> None:
    model = full()
    first = several(model, "a", 4)
    second = model.ask("a", RequestSize(0, 100))
    others = [model.ask("b", RequestSize(0, 100)) for _ in range(3)]
    model.order.clear()
    for _ in range(9):
        model.end()
        model.take(*[admission for admission in [first, second, *others] if admission.unused])
    assert model.order == list("ababab" + "aa")
    assert not len(model.control)
    assert not model.control.queue.tokens


def test_sequences_that_a_leaving_request_never_began_are_not_charged() -> None:
    model = full()
    crowd, later = several(model, "a", 100), model.ask("a")
    model.end()
    model.take(crowd)
    other = [model.ask("b") for _ in range(2)]
    for permit in list(crowd.requested):
        permit.release()
    model.control.leave(crowd)
    assert model.serve([later, *other]) in (list("bab"), list("abb"))
    assert not len(model.control)


def test_one_large_request_lets_others_of_its_client_pass() -> None:
    model = full()
    crowd, small, single = several(model, "a", 100), several(model, "a", 3), model.ask("a")
    model.order.clear()
    model.end()
    model.take(crowd)
    waited = 0
    while single.waiting:
        model.end()
        waited += 1
        model.take(*[admission for admission in (small,) if admission.unused])
    assert waited == GROUP + 3
    assert len(crowd.requested) == 100 - GROUP


def test_a_client_with_its_share_of_the_slots_gets_no_more_while_others_wait() -> None:
    model = full(4)
    for _ in range(4):  # the crowd has every slot
        model.end()
        model.take(model.ask("crowd"))
    crowd = [model.ask("crowd", RequestSize(9, 0)) for _ in range(50)]  # small, so first in the queue
    singles = [model.ask("single", RequestSize(999, 0)) for _ in range(3)]
    model.end()
    assert not singles[0].waiting
    model.take(singles[0])
    model.end()
    assert not singles[1].waiting
    model.take(singles[1])
    model.end(model.running[0])  # the crowd gets this slot: then each client has two
    assert singles[2].waiting
    assert sum(not admission.waiting for admission in crowd) == 1


def test_a_request_that_would_be_too_late_is_told_when_to_retry() -> None:
    model = with_known_rate(AdmissionLimits(max_wait=11.0), seconds=2.0)
    for _ in range(6):
        model.ask("a")
    assert model.refuses("a") == pytest.approx(12.0 - 11.0, abs=0.6)
    assert model.refuses("a", left=8.0) == pytest.approx(12.0 - 8.0 / 2, abs=0.6)
    model.estimate.record(100, ttft=4.0, decode_seconds=0.0)
    assert model.refuses("a", left=8.0) == pytest.approx(12.0 - (8.0 - 4.0) / 2, abs=0.6)
    model.estimate.ttft = 0.5  # the running requests end sooner than the rate says: retry after the minimum
    assert model.refuses("a", left=8.0) == 1.0
    assert len(model.control) == 6
    assert model.ask("b").waiting  # b has the second turn


async def test_a_waiting_request_is_refused_once_its_deadline_cannot_be_met() -> None:
    model = full()
    late, fine = model.ask("a", left=2.0), model.ask("a")
    model.estimate.record(100, ttft=5.0, decode_seconds=0.0)
    model.end()
    with pytest.raises(Overloaded):
        await late.wait()
    await fine.wait()


def test_before_the_rate_is_known_the_wait_is_estimated_from_slots_and_run_times() -> None:
    model = full(3)
    for _ in range(3):
        model.ask("a")  # nothing is known yet
    model.estimate.record(100, ttft=20.0, decode_seconds=0.0)
    for _ in range(2):
        model.ask("a")
    # 5 requests wait for 3 slots, 20 s each; max_wait is 30 s
    assert model.refuses("a") == pytest.approx(100 / 3 - 30)
    assert model.ask("b").waiting


@pytest.mark.parametrize("limits", [AdmissionLimits(max_waiting=4), AdmissionLimits(max_waiting_tokens=400)])
async def test_a_full_queue_drops_the_newest_request_of_the_largest_client(limits: AdmissionLimits) -> None:
    model = Model(0, limits)
    crowd = [model.ask("crowd") for _ in range(4)]
    single = model.ask("single")
    assert single.waiting
    with pytest.raises(Overloaded):
        await crowd[-1].wait()
    assert all(admission.waiting for admission in crowd[:-1])
    other = model.ask("single")  # now two requests of each client wait
    assert other.waiting
    model.refuses("single")


def test_one_request_may_exceed_the_bound_of_tokens_but_not_of_outputs() -> None:
    model = Model(0, AdmissionLimits(max_waiting_tokens=50, max_waiting=8))
    assert model.ask("a").waiting
    with pytest.raises(BadRequest, match="129 outputs") as caught:
        model.ask("b", RequestSize(1, 1, sequences=129, n=129))
    assert caught.value.param == "n"
    with pytest.raises(BadRequest, match="129 outputs") as caught:
        model.ask("b", RequestSize(1, 1, sequences=129))
    assert caught.value.param == "prompt"


def test_unread_answers_are_bounded() -> None:
    model = Model(4, AdmissionLimits(max_waiting=3))
    for _ in range(7):
        admission = model.ask("a")
        permit = admission.permit(lambda: None, lambda: None, lambda: False)
        permit.request()
        permit.release()  # generated, and not yet read
    model.refuses("b")
    with pytest.raises(Overloaded):
        model.control.bypass("b")


async def test_admission_is_idle_when_all_requests_have_left() -> None:
    model = full()
    waits, flex = model.ask("a"), model.ask("batch", is_flex=True)
    passing = model.control.bypass("b")
    await passing.wait()
    idle = asyncio.create_task(model.control.idle())
    model.control.leave(waits)
    model.control.leave(passing)
    model.slots = 0  # so that the flex request keeps waiting
    leaving: list[Callable[[], None]] = [model.end, lambda: model.control.leave(flex)]
    for leave in leaving:
        for _ in range(9):
            await asyncio.sleep(0)
        assert not idle.done()
        leave()
    await idle


def test_clients_without_requests_are_forgotten() -> None:
    model = full()
    waiting = [model.ask("crowd") for _ in range(3)]
    for number in range(3000):  # some request waits all the time
        waiting.append(model.ask(f"client {number}"))
        model.end()
        (admitted,) = [admission for admission in waiting if not admission.waiting]
        waiting.remove(admitted)
        model.take(admitted)
    assert len(model.control.queue._clients) < 1100


def test_a_client_that_waits_is_never_forgotten() -> None:
    model = full()
    first, second = model.ask("a", RequestSize(999, 0)), model.ask("a")
    other = model.ask("b", RequestSize(499, 0))
    model.end()
    assert not other.waiting
    model.control.leave(first)  # the second request moves up, to a tag below the virtual time
    for number in range(2000):
        model.control.leave(model.ask(f"client {number}"))
    model.control.leave(second)
    assert not len(model.control)


# preemption


def greedy(slots: int = 8) -> Model:
    """Return a model with a client that has every slot, and three more requests in the queue."""
    model = Model(slots, pauses=True)
    model.streams("greedy", slots + 3)
    return model


def clients(model: Model) -> str:
    return "".join(sorted(permit.admission.client[0] for permit in model.running))


def test_a_client_without_a_slot_gets_one_and_the_paused_sequence_continues_first() -> None:
    model = greedy()
    youngest = model.running[-1]
    model.take(model.ask("honest"))
    assert model.paused == [youngest]
    assert clients(model) == "gggggggh"
    begun = len(model.order)
    model.end(model.running[-1])
    assert len(model.order) == begun + 1
    assert model.running[-1] is youngest
    while model.running:
        model.end()
        model.take(*[admission for admission in list(model.control._inside) if admission.unused])
    assert not len(model.control)
    assert not model.control.queue.running
    assert not model.control._granted


def test_the_sequences_of_one_large_request_pause_too() -> None:
    model = Model(8, pauses=True)
    crowd = several(model, "greedy", 100)
    assert len(model.running) == 8
    model.take(model.ask("honest"))
    assert clients(model) == "gggggggh"
    assert crowd.requested[0] is model.paused[0]
    model.control.leave(crowd)
    assert clients(model) == "gggggggh"


@pytest.mark.parametrize(
    ("slots", "asked", "expected"), [(8, 1, 1), (8, 2, 2), (8, 8, 3), (32, 32, 11), (2, 5, 1), (1, 5, 0)]
)
def test_a_client_gets_slots_until_no_other_has_more_than_twice_as_many(
    slots: int, asked: int, expected: int
) -> None:
    """A client keeps its only slot (the last case)."""
    model = greedy(slots)
    model.streams("honest", asked)
    for _ in range(50):  # clients do not preempt each other for ever
        model.control.advance()
    assert clients(model).count("h") == expected
    assert len(model.running) == slots
    assert len(model.paused) == expected


def test_a_preempted_slot_goes_to_the_client_for_which_it_was_preempted() -> None:
    """`small` has its fair share already (17 slots, 14 clients). Without this rule, the paused sequence of `greedy`
    would be next in the queue and could get the slot back again and again."""
    model = Model(17, pauses=True)
    model.streams("greedy", 4)
    for client in ("small", *"abcdefghijkl"):
        model.streams(client, 1)
    assert len(model.running) == 17
    admission = model.ask("small")
    assert not admission.waiting
    assert [permit.admission.client for permit in model.paused] == ["greedy"]


def test_sequences_pause_for_kv_tokens_too() -> None:
    model = greedy()
    model.slots, model.tokens = 100, 0.0
    model.control.advance()
    assert not model.paused
    model.capacity = lambda: Capacity(100, 92, 0.0 if len(model.running) > 5 else 1.0)  # type: ignore[method-assign]
    model.control._capacity = model.capacity
    assert not model.ask("honest").waiting
    assert len(model.paused) == 3


def test_an_unread_stream_is_the_first_to_pause_and_continues_when_it_is_read() -> None:
    model = Model(3, pauses=True)
    unread = [model.streams(client, 1)[0] for client in "abc"]
    unread[2].admission.set_unread(True)
    assert not model.paused, "no request waits"
    unread[2].admission.set_unread(False)
    other = model.ask("honest")
    assert other.waiting
    unread[1].admission.set_unread(True)
    assert not other.waiting
    assert model.paused == [unread[1]]
    model.take(other)
    model.end(unread[0])
    assert len(model.running) == 2
    unread[1].admission.set_unread(False)
    assert unread[1] in model.running


def test_an_unread_sequence_that_is_paused_may_end() -> None:
    model = greedy(1)
    permit = model.running[0]
    permit.admission.set_unread(True)
    assert model.paused == [permit]
    permit.release()
    model.control.leave(permit.admission)
    assert not permit.admission.paused


def test_some_slots_are_kept_for_sequences_that_can_pause() -> None:
    """A client without a slot gets one of these slots even for a sequence that cannot pause."""
    model = Model(16, pauses=True)
    model.streams("greedy", 40, can_pause=False)
    assert len(model.running) == 12
    model.streams("honest", 1, can_pause=False)
    model.streams("modest", 1)
    assert clients(model) == "g" * 12 + "hm"
    assert not model.paused
    for permit in list(model.running):
        if permit.admission.client != "greedy":
            model.end(permit)
    assert clients(model) == "g" * 12


def test_sequences_pause_for_another_frontends_requests() -> None:
    model = Model(8, pauses=True)
    model.streams("modest", 2)
    permits = [*model.running, *model.streams("greedy", 6)]
    model.slots = 5
    has_slot = {permit: number < 6 for number, permit in enumerate(permits)}
    model.control.yield_slots(3, has_slot)
    assert clients(model) == "gggmm"
    assert model.paused == [permits[5], permits[4], permits[3]], "permits 6 and 7 have no slot in the engine"
    model.slots = 8
    model.control.advance()
    assert clients(model) == "ggggggmm"


def test_a_client_never_yields_its_only_slot() -> None:
    model = Model(8, pauses=True)
    permits = [
        *model.streams("honest", 1),
        *model.streams("fixed", 4, can_pause=False),
        *model.streams("greedy", 3),
    ]
    model.slots = 0
    model.control.yield_slots(8, dict.fromkeys(permits, False))
    assert clients(model) == "ffffgh"


async def test_time_without_workers_does_not_count_as_a_slow_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a slow start would lengthen the estimated wait, and the first burst after it would be refused."""
    clock, started = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock() + started)
    model = Model(0)
    early = model.ask("a")
    started = 20.0
    model.slots = 2
    model.control.advance()
    model.take(early)
    model.take(model.ask("a"))
    assert len(model.running) == 2
    waiting = [model.ask("a") for _ in range(20)]
    assert len(model.control) == len(waiting)
