import pytest

from pdserve.frontend.model.router import choose
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
