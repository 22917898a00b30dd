import pytest

from pdserve.frontend.model.candidates import Prospect, keeping
from pdserve.frontend.model.router import choose
from pdserve.messages import Load, Promise
from pdserve.records import Instance, Role
from pdserve.settings import POLICIES


def worker(name: str, *, kv_tokens: int = 10_000) -> Instance:
    return Instance(name, Role.DECODE, kv_tokens=kv_tokens)


A, B, C = worker("a"), worker("b"), worker("c")


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_workers_get_requests_in_turn(policy: str) -> None:
    assert choose(policy, [B, C, A], {}, {}) is B


@pytest.mark.parametrize(
    ("candidates", "outstanding", "expected"),
    [
        ([A, B], {"a": 300, "b": 100}, "b"),
        ([A, B], {"a": 100}, "b"),
        ([B, A], {"a": 100, "b": 100}, "b"),
        ([worker("a", kv_tokens=20_000), B], {"a": 400, "b": 300}, "a"),  # relative to what fits its cache
        ([worker("a", kv_tokens=0), worker("b", kv_tokens=0)], {"b": 1}, "a"),
    ],
)
def test_least_loaded(candidates: list[Instance], outstanding: dict[str, float], expected: str) -> None:
    assert choose("least-loaded", candidates, outstanding, {}).id == expected


@pytest.mark.parametrize(
    ("cached", "outstanding", "expected"),
    [
        ({}, {"a": 300, "b": 100, "c": 200}, "b"),
        ({"b": 100}, {}, "b"),
        ({"a": 100, "b": 900}, {"c": 100}, "b"),
        # what is to be computed elsewhere weighs more than a few requests here
        ({"b": 1000}, {"b": 9900}, "b"),
        ({"b": 1000}, {"b": 10_100}, "a"),
        ({"b": 1000}, {"a": 1000, "b": 11_000, "c": 11_000}, "a"),  # the same cost: the less loaded worker
        ({"a": 500, "b": 500, "c": 500}, {"a": 40, "b": 20, "c": 30}, "b"),
        ({"gone": 900}, {}, "a"),
    ],
)
def test_kv(cached: dict[str, int], outstanding: dict[str, float], expected: str) -> None:
    assert choose("kv", [A, B, C], outstanding, cached).id == expected


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
def test_a_promise_is_for_the_workers_that_are_expected_to_keep_it(promise: Promise, expected: str) -> None:
    loads = {"a": KEEPS, "b": SLOW, "c": BUSY}
    prospects = {name: Prospect.of(load, 0, 100) for name, load in loads.items()}
    assert "".join(each.id for each in keeping(promise, [A, B, C], prospects)) == expected


def test_a_worker_of_which_nothing_is_known_is_neither_the_best_nor_left_out() -> None:
    """One of an older build, or before its first report."""
    prospects = {"a": Prospect(0.45, 0.01), "b": Prospect(3.0, 0.01)}
    assert [each.id for each in keeping(Promise(0.5, 0.06), [A, B, C], prospects)] == ["a", "c"]
    assert keeping(Promise(0.5, 0.06), [A, B], {}) == [A, B]


def test_prompts_sent_since_the_report_count() -> None:
    load = Load(prompt_wait=0.25, token_seconds=0.125, gap_seconds=0.04)
    assert Prospect.of(load, 3, 1) == Prospect(0.75, 0.04)
