import pytest

from pdserve.config.schema import POLICIES
from pdserve.frontend.model.router import POLICY_FUNCTIONS, RouterState, choose, eligible
from pdserve.records import Instance, Role


def worker(name: str, *, draining: bool = False, kv_tokens: int = 10_000) -> Instance:
    return Instance(name, Role.DECODE, draining=draining, kv_tokens=kv_tokens)


A, B, C = worker("a"), worker("b"), worker("c")
DRAINING = worker("d", draining=True)


@pytest.mark.parametrize(
    ("instances", "last", "expected"),
    [
        ([A, B, C], "", "a"),
        ([A, B, C], "a", "b"),
        ([A, B, C], "c", "a"),
        ([C, A, B], "a", "b"),
        ([A, C], "b", "c"),
        ([A], "a", "a"),
        ([A, DRAINING], "a", "a"),
        ([DRAINING], "", None),
        ([], "", None),
    ],
)
def test_round_robin(instances: list[Instance], last: str, expected: str | None) -> None:
    chosen = choose("round-robin", instances, RouterState(last))
    assert (chosen.id if chosen else None) == expected


@pytest.mark.parametrize(
    ("instances", "outstanding", "last", "expected"),
    [
        ([A, B], {"a": 300, "b": 100}, "", "b"),
        ([A, B], {"a": 100}, "", "b"),
        ([A, B], {"a": 100, "b": 100}, "", "a"),
        ([A, B], {"a": 100, "b": 100}, "a", "b"),
        ([A, B], {}, "a", "b"),
        (
            [worker("a", kv_tokens=20_000), B],
            {"a": 400, "b": 300},
            "",
            "a",
        ),  # relative to what fits its cache
        ([worker("a", kv_tokens=0), worker("b", kv_tokens=0)], {"b": 1}, "", "a"),
        ([A, DRAINING], {"a": 9000}, "", "a"),
        ([DRAINING], {}, "", None),
    ],
)
def test_least_loaded(
    instances: list[Instance], outstanding: dict[str, float], last: str, expected: str | None
) -> None:
    chosen = choose("least-loaded", instances, RouterState(last, outstanding))
    assert (chosen.id if chosen else None) == expected


@pytest.mark.parametrize(
    ("cached", "outstanding", "last", "expected"),
    [
        ({}, {"a": 300, "b": 100, "c": 200}, "", "b"),
        ({"b": 100}, {}, "", "b"),
        ({"a": 100, "b": 900}, {"c": 100}, "", "b"),
        (
            {"b": 1000},
            {"b": 9900},
            "",
            "b",
        ),  # what is to be computed elsewhere weighs more than a few requests here
        ({"b": 1000}, {"b": 10_100}, "", "a"),
        ({"b": 1000}, {"a": 1000, "b": 11_000, "c": 11_000}, "", "a"),  # just as dear: the less loaded one
        ({"a": 500, "b": 500, "c": 500}, {"a": 40, "b": 20, "c": 30}, "", "b"),  # all have it
        ({"a": 500, "b": 500, "c": 500}, {}, "a", "b"),
        ({"d": 900}, {}, "", "a"),  # it is draining
        ({"gone": 900}, {}, "a", "b"),
    ],
)
def test_kv(cached: dict[str, int], outstanding: dict[str, float], last: str, expected: str | None) -> None:
    chosen = choose("kv", [A, B, C, DRAINING], RouterState(last, outstanding, cached))
    assert chosen is not None
    assert chosen.id == expected


@pytest.mark.parametrize(
    ("avoid", "only_others", "expected"),
    [
        ((), False, ["a", "b", "c"]),
        ({"a"}, False, ["b", "c"]),
        ({"a", "b", "c"}, False, ["a", "b", "c"]),
        ({"a", "b", "c"}, True, []),
        ({"a", "b"}, True, ["c"]),
        ((), True, ["a", "b", "c"]),
    ],
)
def test_eligible(avoid: set[str], only_others: bool, expected: list[str]) -> None:
    found = eligible([C, DRAINING, B, A], avoid, only_others=only_others)
    assert [instance.id for instance in found] == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("full", "avoid", "only_others", "expected"),
    [
        ({"a"}, (), False, "b"),
        ({"a", "b", "c"}, (), False, "a"),
        ({"b", "c"}, {"a"}, False, "b"),  # a worker that failed it is the last resort, even with capacity
        ({"b"}, {"a"}, False, "c"),
        ({"a"}, {"a", "b", "c"}, True, None),
    ],
)
def test_full_workers_are_chosen_last(
    policy: str, full: set[str], avoid: set[str], only_others: bool, expected: str | None
) -> None:
    state = RouterState(full=full, cached={"a": 5000})
    chosen = choose(policy, [A, B, C], state, avoid, only_others=only_others)
    assert (chosen.id if chosen else None) == expected


def test_every_policy_of_the_configuration_has_its_function() -> None:
    assert tuple(POLICY_FUNCTIONS) == POLICIES


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match=r"fastest.*round-robin, least-loaded, kv"):
        choose("fastest", [A], RouterState())
