"""The router's choice, and the candidates that it chooses from, which are updated as workers change."""

from random import Random

import pytest

from pdserve.contract.live_settings import POLICIES
from pdserve.contract.messages import Load, Promise
from pdserve.contract.records import Instance, Role
from pdserve.frontend.admission.capacity import Capacity
from pdserve.frontend.edge.request_state import RequestState
from pdserve.frontend.sequence.generation import Generation
from pdserve.frontend.vllm.api_server import EngineCoreRequest
from pdserve.frontend.workers.candidates import WINDOW, Candidates
from pdserve.frontend.workers.link import Link
from pdserve.frontend.workers.router import Forecast, choose, likely_to_keep

# the choice


def worker(name: str, *, kv_tokens: int = 10_000) -> Instance:
    return Instance(name, Role.DECODE, kv_tokens=kv_tokens)


A, B, C = worker("a"), worker("b"), worker("c")


@pytest.mark.parametrize(
    ("policy", "candidates", "outstanding", "cached", "expected"),
    [
        *((policy, [B, C, A], {}, {}, "b") for policy in POLICIES),  # all equal: the next in turn
        ("least-loaded", [A, B], {"a": 300, "b": 100}, {}, "b"),
        ("least-loaded", [A, B], {"a": 100}, {}, "b"),
        ("least-loaded", [B, A], {"a": 100, "b": 100}, {}, "b"),
        ("least-loaded", [worker("a", kv_tokens=20_000), B], {"a": 400, "b": 300}, {}, "a"),  # relative to KV cache
        ("least-loaded", [worker("a", kv_tokens=0), worker("b", kv_tokens=0)], {"b": 1}, {}, "a"),
        ("kv", [A, B, C], {"a": 300, "b": 100, "c": 200}, {}, "b"),
        ("kv", [A, B, C], {"c": 100}, {"a": 100, "b": 900}, "b"),
        # a cached prompt token counts as much as ten outstanding ones
        ("kv", [A, B, C], {"b": 9900}, {"b": 1000}, "b"),
        ("kv", [A, B, C], {"b": 10_100}, {"b": 1000}, "a"),
        ("kv", [A, B, C], {"a": 1000, "b": 11_000, "c": 11_000}, {"b": 1000}, "a"),  # the same cost: the less loaded
        ("kv", [A, B, C], {"a": 40, "b": 20, "c": 30}, {"a": 500, "b": 500, "c": 500}, "b"),
        ("kv", [A, B, C], {}, {"gone": 900}, "a"),
    ],
)  # fmt: skip
def test_which_worker_is_chosen(
    policy: str,
    candidates: list[Instance],
    outstanding: dict[str, float],
    cached: dict[str, int],
    expected: str,
) -> None:
    assert choose(policy, candidates, outstanding, cached).id == expected


KEEPS, SLOW, BUSY = Load(), Load(gap_seconds=0.1), Load(prompt_wait=2.0, token_seconds=0.0001)


@pytest.mark.parametrize(
    ("promise", "expected"),
    [
        (Promise(0.5, 0.06), "a"),
        (Promise(0.5), "ab"),
        (Promise(None, 0.06), "ac"),
        (Promise(5.0, 0.2), "abc"),
        (Promise(-1.0, 0.06), "abc"),  # late everywhere
        (Promise(0.001, 0.001), "a"),
    ],
)
def test_workers_that_are_likelier_than_the_best_to_miss_a_promise_are_no_candidates(
    promise: Promise, expected: str
) -> None:
    loads = {"a": KEEPS, "b": SLOW, "c": BUSY}
    forecasts = {name: Forecast.of(load, 0, 100) for name, load in loads.items()}
    assert "".join(each.id for each in likely_to_keep(promise, [A, B, C], forecasts)) == expected


def test_a_worker_without_a_forecast_stays_a_candidate() -> None:
    """Workers of older versions, and workers that have just started, have no forecast."""
    forecasts = {"a": Forecast(0.45, 0.01), "b": Forecast(3.0, 0.01)}
    assert [each.id for each in likely_to_keep(Promise(0.5, 0.06), [A, B, C], forecasts)] == ["a", "c"]
    assert likely_to_keep(Promise(0.5, 0.06), [A, B], {}) == [A, B]


def test_prompts_sent_since_the_report_count() -> None:
    load = Load(prompt_wait=0.25, token_seconds=0.125, gap_seconds=0.04)
    assert Forecast.of(load, 3, 1) == Forecast(0.75, 0.04)


# the candidates


FREE, FULL = Capacity(10, 3, 100), Capacity(10, 0, 900)


def candidates(workers: dict[str, Capacity]) -> Candidates:
    found = Candidates()
    for name, capacity in workers.items():
        found.set(name, capacity)
    return found


@pytest.mark.parametrize(
    ("avoid", "never", "expected"),
    [
        ({"a"}, set(), "b"),
        ({"a", "b"}, set(), "a"),
        (set(), {"a", "b"}, ""),
        (set(), {"b"}, "a"),
        ({"a"}, {"b"}, "a"),
    ],
)
def test_a_worker_that_lost_the_request_is_the_last_resort_even_with_capacity(
    avoid: set[str], never: set[str], expected: str
) -> None:
    found = candidates({"a": FREE, "b": FULL}).next_in_turn("", avoid=avoid, never=never)
    assert "".join(found) == expected


def test_a_choice_considers_only_a_window_of_workers() -> None:
    names = [f"{number:03}" for number in range(100)]
    found = candidates(dict.fromkeys(names, FREE))
    assert found.next_in_turn("097", avoid={"099", "001"}) == ["098", "000", *names[2:WINDOW]]


@pytest.mark.parametrize(
    ("changed", "avoid", "expected"),
    [
        ({}, set(), ["97", "05"]),
        ({}, {"97"}, ["05"]),
        ({"97": FULL}, set(), ["05"]),
        ({"97": None}, set(), ["05"]),
        (dict.fromkeys([f"{number:02}" for number in range(100)], FULL), set(), ["97", "05"]),
    ],
)
def test_preferred_workers_are_added_to_the_window_if_they_are_as_eligible(
    changed: dict[str, Capacity | None], avoid: set[str], expected: list[str]
) -> None:
    found = candidates({f"{number:02}": FREE for number in range(100)})
    for name, capacity in changed.items():
        found.set(name, capacity)
    chosen = found.next_in_turn("20", avoid=avoid, preferred=["97", "21", "05", "gone"])
    assert chosen == [*(f"{number}" for number in range(21, 21 + WINDOW)), *expected]


def test_candidates_are_right_after_any_changes() -> None:
    chance, there, found = Random(5), dict[str, Capacity](), Candidates()
    for _ in range(3000):
        name = f"{chance.randrange(40):02}"
        if chance.random() < 0.3:
            there.pop(name, None)
            found.set(name, None)
        else:
            there[name] = Capacity(10, chance.randrange(3), chance.choice([0.0, 0.1, 7.3, float("inf")]))
            found.set(name, there[name])
        free = {each: capacity for each, capacity in there.items() if capacity.has_room}
        assert len(found) == len(there)
        assert {each for each in there if not found.is_full(each)} == free.keys()
        total = found.capacity
        assert total.max_requests == 10 * len(there)
        assert total.free_requests == sum(capacity.free_requests for capacity in free.values())
        assert total.free_tokens == pytest.approx(sum(capacity.free_tokens for capacity in free.values()))
        last = f"{chance.randrange(40):02}"
        order = sorted(free or there)
        turn = [name for name in order if name > last] + [name for name in order if name <= last]
        assert found.next_in_turn(last) == turn[:WINDOW]


# outstanding tokens


def generation(prompt: list[int], **fields: float) -> Generation:
    request = EngineCoreRequest("r", prompt, None, None, None, 0.0, None, None, None)
    return Generation(request, RequestState("r", "/v1/completions", 0.0), **fields)  # type: ignore[arg-type]


def test_outstanding_tokens_assume_that_other_frontends_chose_alike_since_the_report() -> None:
    link = Link("decode-0", lambda _: None)
    first, second = generation([1] * 50, kv_tokens=60.0), generation([1] * 50, kv_tokens=70.0)
    first.attach(link, "1")
    assert [link.outstanding(frontends) for frontends in (1, 3)] == [60, 3 * 60]
    first.add_tokens([5] * 4)
    link.update_load(Load(tokens=1054))
    assert [link.outstanding(frontends) for frontends in (1, 3)] == [1060, 1060]
    second.attach(link, "2")
    assert [link.outstanding(frontends) for frontends in (1, 3)] == [1130, 1130 + 2 * 70]
    first.detach()
    link.update_load(Load(tokens=20))  # a report from before the second request
    assert link.outstanding(3) == 70
    generation([1] * 50, kv_tokens=80.0).attach(link, "3")
    second.detach()
    link.generations["3"].detach()
    assert (link.outstanding(3), link.new_prompt_tokens) == (0, 0), (
        "also without a report: an unchanged load sends none"
    )
