"""The plan of rounds, as a table."""

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


@pytest.mark.parametrize(
    ("measured", "rounds_of_1", "rounds_of_2"),
    [(0, [], []), (3, [0], []), (5, [0], []), (6, [0], [0]), (9, [0], [0, 1]), (12, [0, 1], [0, 1])],
)
def test_complete_rounds(measured: int, rounds_of_1: list[int], rounds_of_2: list[int]) -> None:
    plan = alternate("AB", "12", 2)
    done = set(plan[:measured])
    assert (complete_rounds(plan, done, "1"), complete_rounds(plan, done, "2")) == (rounds_of_1, rounds_of_2)
