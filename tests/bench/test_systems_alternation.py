"""The plan of rounds, as a table."""

from itertools import pairwise

import pytest
from pdserve_bench.systems.alternation import Turn, alternate, complete_rounds


def told(turns: list[Turn]) -> str:
    """`A1` is system A under load 1, `A1'` its control; rounds are apart."""
    rounds = sorted({turn.round for turn in turns})
    return "  ".join(
        " ".join(
            f"{turn.system}{turn.load}{chr(39) * turn.control}" for turn in turns if turn.round == number
        )
        for number in rounds
    )


@pytest.mark.parametrize(
    ("systems", "loads", "rounds", "grouped", "expected"),
    [
        ("ABC", "1", 3, False, "A1 B1 C1 A1'  A1' C1 B1 A1  A1 B1 C1 A1'"),
        ("AB", "12", 2, False, "A1 B1 A1' A2 B2 A2'  A2' B2 A2 A1' B1 A1"),
        ("AB", "12", 2, True, "A1 A2 B1 B2 A1' A2'  A2' A1' B2 B1 A2 A1"),
        ("A", "1", 1, False, "A1 A1'"),
        ("AB", "12", 0, False, ""),
    ],
)
def test_orders(systems: str, loads: str, rounds: int, grouped: bool, expected: str) -> None:
    turns = alternate(systems, loads, rounds, grouped=grouped)
    assert told(turns) == expected
    assert len(set(turns)) == len(turns)


def test_a_grouped_system_is_started_once_in_a_round_and_goes_on_into_the_next() -> None:
    turns = alternate("ABC", "123", 4, grouped=True)
    starts = sum(before.system != after.system for before, after in pairwise(turns)) + 1
    assert starts == 4 * 3 + 1  # A B C A | A C B A | ...: not 4 * 4


def test_a_drift_cancels_out() -> None:
    """Positions of a system and of the baseline, both turns of it, have the same mean over each pair of rounds."""
    turns = alternate("ABCD", "1", 2)
    places = {name: [place for place, turn in enumerate(turns) if turn.system == name] for name in "ABCD"}
    assert {sum(found) / len(found) for found in places.values()} == {4.5}


@pytest.mark.parametrize(
    ("measured", "rounds_of_1", "rounds_of_2"),
    [(0, [], []), (3, [0], []), (5, [0], []), (6, [0], [0]), (9, [0], [0, 1]), (12, [0, 1], [0, 1])],
)
def test_complete_rounds(measured: int, rounds_of_1: list[int], rounds_of_2: list[int]) -> None:
    plan = alternate("AB", "12", 2)
    done = set(plan[:measured])
    assert (complete_rounds(plan, done, "1"), complete_rounds(plan, done, "2")) == (rounds_of_1, rounds_of_2)
