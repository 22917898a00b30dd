"""The line by itself: the room is a number that the test sets."""

import asyncio
import time
from contextlib import suppress

import pytest

from pdserve.config.schema import AdmissionLimits
from pdserve.errors import Overloaded
from pdserve.frontend.admission.capacity import Capacity
from pdserve.frontend.admission.control import (
    GROUP,
    Admission,
    AdmissionControl,
    ModelReplaced,
    SequencePermit,
)
from pdserve.frontend.admission.estimate import RequestEstimate
from pdserve.frontend.body import Asks, Refusal

ASKS = Asks(99, 0)  # 100 tokens


class Model:
    """As the decode workers: so many places, some of them taken."""

    def __init__(self, places: int, limits: AdmissionLimits = AdmissionLimits()) -> None:  # noqa: B008  # frozen
        self.places, self.tokens = places, float("inf")
        self.running: list[SequencePermit] = []
        self.order: list[str] = []
        """the clients whose sequences began"""
        self.usual = RequestEstimate()
        self.admission = AdmissionControl(limits, self.room, lambda: self.usual)

    def room(self) -> Capacity:
        return Capacity(self.places, self.places - len(self.running), self.tokens)

    def ask(self, client: str, asks: Asks = ASKS, left: float = 600.0) -> Admission:
        return self.admission.join(client, asks, time.monotonic() + left)

    def take(self, *tickets: Admission) -> None:
        """As the engine core: all of their sequences ask for a turn."""
        for ticket in tickets:
            for _ in range(ticket.asks.sequences):
                self.sequence(ticket)

    def sequence(self, ticket: Admission) -> SequencePermit:
        turn = ticket.permit(lambda: self.begin(turn), lambda: turn.release())
        turn.request()
        return turn

    def begin(self, turn: SequencePermit) -> None:
        self.running.append(turn)
        self.order.append(turn.ticket.client)

    def end(self, turn: SequencePermit | None = None) -> None:
        """This one is done, or the first one that runs; with its last one a request is."""
        turn = turn or self.running[0]
        self.running.remove(turn)
        turn.release()
        ticket = turn.ticket
        if ticket.asked or any(one.ticket is ticket for one in self.running):
            self.admission.advance()
        else:
            self.admission.leave(ticket)

    def serve(self, waiting: list[Admission]) -> list[str]:
        """Everybody, one after another: the clients in order of their turns."""
        order = []
        while waiting:
            self.end()
            (called,) = [one for one in waiting if not one.waiting]
            waiting.remove(called)
            self.take(called)
            order.append(called.client)
        return order


def full(places: int = 1, limits: AdmissionLimits = AdmissionLimits()) -> Model:  # noqa: B008  # frozen
    model = Model(places, limits)
    for _ in range(places):
        model.take(model.ask("early"))
    return model


def paced(limits: AdmissionLimits, seconds: float) -> Model:
    """Full, and for some time a turn of 100 tokens came every so many seconds."""
    model = full(1, limits)
    pace = model.admission._pace
    now = time.monotonic()
    pace.waiting(True, now - 100 * seconds)
    for step in range(100):
        pace.turn(100, now - (100 - step) * seconds)
    pace.waiting(False, now)
    return model


def test_there_is_room() -> None:
    model = Model(2)
    assert not model.ask("a").waiting
    assert not model.ask("a").waiting
    assert model.ask("a").waiting  # nobody has begun, and still both places are taken


def test_kv_is_room_too() -> None:
    model = Model(8)
    model.tokens = 150.0
    assert not model.ask("a").waiting  # needs 100
    assert not model.ask("a").waiting  # something is left: it may be longer
    assert model.ask("a").waiting
    model.tokens = 0.0
    model.admission.advance()
    assert len(model.admission) == 1


def test_turns_go_round() -> None:
    model = full()
    waiting = [model.ask(client) for client in "aaaabbc"]
    assert model.serve(waiting) == list("abcabaa")


def test_a_client_that_comes_later_goes_before_a_crowd() -> None:
    model = full()
    crowd = [model.ask("crowd") for _ in range(50)]
    assert model.serve(crowd[:1]) == ["crowd"]
    single = model.ask("single")
    assert model.serve([crowd[1]]) == ["crowd"]
    model.end()
    assert not single.waiting
    assert all(one.waiting for one in crowd[2:])


def test_turns_are_fair_in_tokens() -> None:
    model = full()
    waiting = [model.ask("long", Asks(399, 0)) for _ in range(3)] + [model.ask("short") for _ in range(8)]
    order = model.serve(waiting)
    assert order[:6].count("short") >= 4


def several(model: Model, client: str, sequences: int) -> Admission:
    model.usual.learn(100, 0.0, 0.0)
    ticket = model.ask(client, Asks(0, 100, sequences, sequences))
    if not ticket.waiting:
        model.take(ticket)
    return ticket


def test_the_outputs_of_one_request_take_turns_like_those_of_many() -> None:
    model = Model(2)
    crowd = several(model, "crowd", 8)
    assert model.order == ["crowd", "crowd"]  # alone it may have every place
    singles = [model.ask("single", Asks(0, 100)) for _ in range(2)]
    assert len(crowd.asked) == 6
    model.end()
    assert not singles[0].waiting
    model.take(singles[0])
    model.end()  # each has one of two places: round in turn
    model.end(model.running[0])
    assert singles[1].waiting is False
    model.take(singles[1])
    while model.running:
        model.end()
    assert model.order.count("crowd") == 8
    assert not len(model.admission)
    assert not model.admission._tokens


def test_several_outputs_are_paid_for() -> None:
    model = full()
    first = several(model, "a", 4)
    second = model.ask("a", Asks(0, 100))
    others = [model.ask("b", Asks(0, 100)) for _ in range(3)]
    model.order.clear()
    for _ in range(9):
        model.end()
        model.take(*[one for one in [first, second, *others] if one.unused])
    assert model.order == list("ababab" + "aa")


def test_what_is_left_of_a_request_is_not_charged() -> None:
    model = full()
    crowd, later = several(model, "a", 100), model.ask("a")
    model.end()
    model.take(crowd)
    other = [model.ask("b") for _ in range(2)]
    for turn in list(crowd.asked):
        turn.release()
    model.admission.leave(crowd)
    assert model.serve([later, *other]) in (list("bab"), list("abb"))
    assert not len(model.admission)


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
        model.take(*[one for one in (small,) if one.unused])
    assert waited == GROUP + 3
    assert len(crowd.asked) == 100 - GROUP


def test_sequences_that_wait_end_with_their_request() -> None:
    model = full()
    crowd = model.ask("a", Asks(0, 1, 3, 3))
    model.end()
    model.take(crowd)
    assert len(crowd.asked) == 2
    model.admission.leave(crowd)
    assert not crowd.asked
    assert not len(model.admission)
    model.end()
    assert not model.admission._accounts["a"].held


def test_more_sequences_than_were_told() -> None:
    model = Model(1)
    ticket = model.ask("a")
    turns = [model.sequence(ticket) for _ in range(3)]  # a beam search
    assert [turn.granted for turn in turns] == [True, False, False]
    single = model.ask("b")
    model.end()
    model.end()
    assert not single.waiting
    model.take(single)
    model.end()
    model.end()
    assert model.order == list("aaba")
    assert not len(model.admission)


def test_a_client_with_its_share_of_the_places_gets_no_more_while_others_wait() -> None:
    model = full(4)
    for _ in range(4):  # the crowd holds every place
        model.end()
        model.take(model.ask("crowd"))
    crowd = [model.ask("crowd", Asks(9, 0)) for _ in range(50)]  # small ones, whose turns would come first
    singles = [model.ask("single", Asks(999, 0)) for _ in range(3)]
    model.end()
    assert not singles[0].waiting
    model.take(singles[0])
    model.end()
    assert not singles[1].waiting
    model.take(singles[1])
    model.end(model.running[0])  # two each now
    assert singles[2].waiting
    assert sum(not one.waiting for one in crowd) == 1


def test_a_client_alone_may_hold_every_place() -> None:
    model = Model(8)
    for _ in range(8):
        model.take(model.ask("a"))
    assert len(model.running) == 8
    other = model.ask("b")
    assert other.waiting
    model.admission.leave(other)
    model.ask("a")
    model.end()
    assert len(model.running) == 7
    assert not len(model.admission)


def test_who_was_away_saves_nothing() -> None:
    model = full()
    model.serve([model.ask("a") for _ in range(10)])
    waiting = [model.ask(client) for client in "bbbaaa"]
    assert model.serve(waiting) == list("baba" + "ba")


def test_who_leaves_is_not_charged() -> None:
    model = full()
    left = [model.ask("a") for _ in range(5)]
    stays = model.ask("a")
    for ticket in left:
        model.admission.leave(ticket)
    waiting = [stays, model.ask("b"), model.ask("b")]
    assert model.serve(waiting) == list("abb")
    assert not len(model.admission)


def test_too_late_is_said_at_once_with_the_truth() -> None:
    model = paced(AdmissionLimits(max_wait=11.0), seconds=2.0)
    for _ in range(6):
        model.ask("a")
    with pytest.raises(Overloaded) as caught:
        model.ask("a")
    assert caught.value.retry_after == pytest.approx(12.0 - 11.0, abs=0.6)
    assert len(model.admission) == 6
    assert model.ask("b").waiting  # its turn is the next but one


def test_a_deadline_leaves_time_to_run() -> None:
    model = paced(AdmissionLimits(max_wait=100.0), seconds=1.0)
    model.usual.learn(100, ttft=4.0, decode_seconds=0.0)
    for _ in range(3):
        model.ask("a", left=600)
    model.ask("a", left=10.5)  # 6.5 to spare: may wait for 3
    with pytest.raises(Overloaded):
        model.ask("a", left=10.5)


async def test_a_deadline_that_cannot_be_met_any_more() -> None:
    model = full()
    late, fine = model.ask("a", left=2.0), model.ask("a")
    model.usual.learn(100, ttft=5.0, decode_seconds=0.0)
    model.end()
    with pytest.raises(Overloaded):
        await late.turn()
    await fine.turn()


def test_before_the_pace_is_known_it_is_places_and_what_is_usual() -> None:
    model = full(3)
    for _ in range(3):
        model.ask("a")  # nobody knows anything
    model.usual.learn(100, ttft=20.0, decode_seconds=0.0)
    for _ in range(2):
        model.ask("a")
    with pytest.raises(Overloaded) as caught:
        model.ask("a")  # after 5, in rounds of 3, 20 s each
    assert caught.value.retry_after == pytest.approx(100 / 3 - 30)
    assert model.ask("b").waiting


def test_without_workers_everybody_waits_within_the_bounds() -> None:
    model = Model(0, AdmissionLimits(max_waiting=5))
    waiting = [model.ask("a") for _ in range(5)]
    with pytest.raises(Overloaded):
        model.ask("a")
    assert all(one.waiting for one in waiting)
    model.places = 10
    model.admission.advance()
    assert not any(one.waiting for one in waiting)


@pytest.mark.parametrize("limits", [AdmissionLimits(max_waiting=4), AdmissionLimits(max_waiting_tokens=400)])
async def test_a_full_line_makes_place_for_who_has_less(limits: AdmissionLimits) -> None:
    model = Model(0, limits)
    crowd = [model.ask("crowd") for _ in range(4)]
    single = model.ask("single")
    assert single.waiting
    with pytest.raises(Overloaded):
        await crowd[-1].turn()
    assert all(one.waiting for one in crowd[:-1])
    other = model.ask("single")  # two each
    assert other.waiting
    with pytest.raises(Overloaded):
        model.ask("single")


def test_one_that_is_over_a_bound_by_itself() -> None:
    model = Model(0, AdmissionLimits(max_waiting_tokens=50, max_waiting=8))
    assert model.ask("a").waiting
    with pytest.raises(Refusal, match="129 outputs") as caught:
        model.ask("b", Asks(1, 1, sequences=129, n=129))
    assert caught.value.param == "n"
    with pytest.raises(Refusal, match="129 outputs") as caught:
        model.ask("b", Asks(1, 1, sequences=129))
    assert caught.value.param == "prompt"


def test_answers_that_nobody_reads_are_bounded() -> None:
    model = Model(4, AdmissionLimits(max_waiting=3))
    for _ in range(7):
        ticket = model.ask("a")
        turn = ticket.permit(lambda: None, lambda: None)
        turn.request()
        turn.release()  # generated, and not yet read
    with pytest.raises(Overloaded):
        model.ask("b")
    with pytest.raises(Overloaded):
        model.admission.pass_by()


async def test_empty_when_all_have_left() -> None:
    model = full()
    waits = model.ask("a")
    passing = model.admission.pass_by()
    await passing.turn()
    empty = asyncio.create_task(model.admission.empty())
    model.admission.leave(waits)
    model.admission.leave(passing)
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(empty), 0.01)
    assert not empty.done()
    model.end()
    await empty


def test_clients_are_forgotten() -> None:
    model = Model(1)
    for number in range(5000):
        model.admission.leave(model.ask(f"client {number}"))
    assert len(model.admission._accounts) < 1100
    model = full()
    waiting = [model.ask("crowd") for _ in range(3)]
    for number in range(3000):  # somebody waits all the time
        waiting.append(model.ask(f"client {number}"))
        model.end()
        (called,) = [one for one in waiting if not one.waiting]
        waiting.remove(called)
        model.take(called)
    assert len(model.admission._accounts) < 1100


def test_a_client_that_waits_is_never_forgotten() -> None:
    model = full()
    first, second = model.ask("a", Asks(999, 0)), model.ask("a")
    other = model.ask("b", Asks(499, 0))
    model.end()
    assert not other.waiting
    model.admission.leave(first)  # the second one moves up, to a place that has been served
    for number in range(2000):
        model.admission.leave(model.ask(f"client {number}"))
    model.admission.leave(second)
    assert not len(model.admission)


async def test_those_who_wait_go_to_another_line_in_their_order() -> None:
    model = full()
    waiting = [model.ask(client) for client in "aab"]
    waiting.sort(key=lambda one: one.place)
    model.admission.dissolve()
    for ticket in waiting:
        with pytest.raises(ModelReplaced):
            await ticket.turn()
        model.admission.leave(ticket)
    assert (len(model.admission), model.admission.requests) == (0, 1), "what was called stays"
    assert [ticket.client for ticket in waiting] == list("aba")
