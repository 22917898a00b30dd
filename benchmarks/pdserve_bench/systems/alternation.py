"""Which system is measured when, under which load. Pure.

A round measures each system once under each load, and the next round does so in the opposite order (ABBA): what slows
the machine for a while slows all of them, and what grows slowly (heat, a filling cache) cancels out. The baseline comes
twice in each round, at both ends: its two turns differ by nothing but noise.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    round: int
    """from 0"""
    system: str
    load: str
    control: bool = False
    """the baseline for the second time"""


def alternate(
    systems: Sequence[str], loads: Sequence[str], rounds: int, *, grouped: bool = False
) -> list[Turn]:
    """The first system is the baseline. All systems get a load one after the other, so that those that are compared are
    near each other in time; `grouped`: a system gets all loads one after the other, so that it is started once in a
    round where only one may run at a time (and the last of a round is the first of the next: it goes on running)."""
    entrants = [*((system, False) for system in systems), (systems[0], True)]
    pairs = [(entrant, load) for load in loads for entrant in entrants]
    if grouped:
        pairs = [(entrant, load) for entrant in entrants for load in loads]
    turns: list[Turn] = []
    for number in range(rounds):
        made = [Turn(number, system, load, again) for (system, again), load in pairs]
        turns += reversed(made) if number % 2 else made
    return turns


def complete_rounds(plan: Collection[Turn], done: Collection[Turn], load: str) -> list[int]:
    """The rounds in which every turn of this load was measured: medians are taken over these."""
    missing = {turn.round for turn in plan if turn.load == load and turn not in done}
    return sorted({turn.round for turn in plan if turn.load == load} - missing)
