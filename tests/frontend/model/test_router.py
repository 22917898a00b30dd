import pytest

from pdserve.config.schema import POLICIES
from pdserve.frontend.model.router import POLICY_FUNCTIONS, RouterState, choose, eligible
from pdserve.records import Instance, Load, Role


def worker(
    name: str, *, draining: bool = False, running: int = 0, kv: float = 0.0, room: float = 4.0
) -> Instance:
    load = Load(running=running, kv_usage=kv)
    return Instance(name, Role.DECODE, draining=draining, load=load, max_concurrency=room)


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
    ("instances", "in_flight", "last", "expected"),
    [
        ([worker("a", running=3), worker("b", running=1)], {}, "", "b"),
        ([worker("a"), worker("b")], {"a": 2}, "", "b"),
        ([worker("a", running=1), worker("b")], {"b": 5}, "", "a"),
        ([worker("a", running=4, room=8), worker("b", running=3)], {}, "", "a"),
        ([worker("a", kv=0.9), worker("b", kv=0.1)], {}, "", "b"),
        ([worker("a"), worker("b")], {}, "a", "b"),
        ([worker("a", room=0), worker("b", room=0, running=1)], {}, "", "a"),
        ([worker("a", running=9), DRAINING], {}, "", "a"),
        ([DRAINING], {}, "", None),
    ],
)
def test_least_loaded(
    instances: list[Instance], in_flight: dict[str, int], last: str, expected: str | None
) -> None:
    chosen = choose("least-loaded", instances, RouterState(last, in_flight))
    assert (chosen.id if chosen else None) == expected


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
    chosen = choose(policy, [A, B, C], RouterState(full=full), avoid, only_others=only_others)
    assert (chosen.id if chosen else None) == expected


def test_every_policy_of_the_configuration_has_its_function() -> None:
    assert tuple(POLICY_FUNCTIONS) == POLICIES


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match=r"kv.*round-robin, least-loaded"):
        choose("kv", [A], RouterState())
