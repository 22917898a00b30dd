"""What is kept up as workers change is what a look at all of them would find."""

from random import Random

import pytest

from pdserve.frontend.admission.capacity import Capacity
from pdserve.frontend.model.candidates import WINDOW, Candidates

FREE, FULL = Capacity(10, 3, 100), Capacity(10, 0, 900)


def candidates(workers: dict[str, Capacity]) -> Candidates:
    found = Candidates()
    for name, capacity in workers.items():
        found.set(name, capacity)
    return found


@pytest.mark.parametrize(
    ("avoid", "only_others", "expected"),
    [({"a"}, False, "b"), ({"a", "b"}, False, "a"), ({"a", "b"}, True, ""), ({"b"}, True, "a")],
)
def test_where_it_failed_is_the_last_resort_even_with_capacity(
    avoid: set[str], only_others: bool, expected: str
) -> None:
    found = candidates({"a": FREE, "b": FULL}).next("", avoid, only_others=only_others)
    assert "".join(found) == expected


def test_a_choice_looks_at_a_window() -> None:
    names = [f"{number:03}" for number in range(100)]
    found = candidates(dict.fromkeys(names, FREE))
    assert found.next("097", {"099", "001"}, only_others=False) == ["098", "000", *names[2:WINDOW]]


@pytest.mark.parametrize(
    ("changed", "avoid", "expected"),
    [
        ({}, (), ["97", "05"]),
        ({}, {"97"}, ["05"]),
        ({"97": FULL}, (), ["05"]),
        ({"97": None}, (), ["05"]),
        (dict.fromkeys([f"{number:02}" for number in range(100)], FULL), (), ["97", "05"]),
    ],
)
def test_preferred_workers_are_added_to_the_window_where_they_are_as_eligible(
    changed: dict[str, Capacity | None], avoid: set[str], expected: list[str]
) -> None:
    found = candidates({f"{number:02}": FREE for number in range(100)})
    for name, capacity in changed.items():
        found.set(name, capacity)
    chosen = found.next("20", avoid, only_others=False, preferred=["97", "21", "05", "gone"])
    assert chosen == [*(f"{number}" for number in range(21, 21 + WINDOW)), *expected]


def test_after_any_changes() -> None:
    chance, there, found = Random(5), dict[str, Capacity](), Candidates()
    for _ in range(3000):
        name = f"{chance.randrange(40):02}"
        if chance.random() < 0.3:
            there.pop(name, None)
            found.set(name, None)
        else:
            there[name] = Capacity(10, chance.randrange(3), chance.choice([0.0, 0.1, 7.3, float("inf")]))
            found.set(name, there[name])
        free = {each: capacity for each, capacity in there.items() if capacity.available}
        assert len(found) == len(there)
        assert {each for each in there if not found.full(each)} == free.keys()
        total = found.capacity
        assert total.max_requests == 10 * len(there)
        assert total.free_requests == sum(capacity.free_requests for capacity in free.values())
        assert total.free_tokens == pytest.approx(sum(capacity.free_tokens for capacity in free.values()))
        last = f"{chance.randrange(40):02}"
        order = sorted(free or there)
        turn = [name for name in order if name > last] + [name for name in order if name <= last]
        assert found.next(last, (), only_others=False) == turn[:WINDOW]
