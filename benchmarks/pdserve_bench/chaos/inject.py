"""What is done to the victims, and undone where it can be."""

import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

from pdserve_bench.chaos.cut import cut_off
from pdserve_bench.chaos.faults import Kind, Victim


@asynccontextmanager
async def injected(
    kind: Kind, victims: Sequence[Victim], supervisor: int, state_dir: Path
) -> AsyncIterator[None]:
    """What hangs or is cut off does so while this is entered; the others have been told to end by then. Raises
    LookupError where a victim has ended by itself, and Cannot."""
    match kind:
        case Kind.KILL:
            _send(victims, signal.SIGKILL)
            yield
        case Kind.LOSE:
            _send(victims, signal.SIGSTOP)  # so that it writes nothing anew before it ends
            for one in victims:
                _take_away(state_dir / one.name)
            _send(victims, signal.SIGKILL)
            yield
        case Kind.DRAIN:
            _send(victims, signal.SIGTERM, os.kill)  # the role alone: it stops those below it itself
            yield
        case Kind.HANG:
            _send(victims, signal.SIGSTOP)
            try:
                yield
            finally:
                with suppress(LookupError):
                    _send(victims, signal.SIGCONT)
        case Kind.CUT:
            (victim,) = victims
            async with cut_off(victim.group, _family(supervisor)):
                yield


def _send(
    victims: Sequence[Victim], number: signal.Signals, how: Callable[[int, int], None] = os.killpg
) -> None:
    for one in victims:
        try:
            how(one.group, number)
        except ProcessLookupError:
            raise LookupError(f"{one.name} has ended by itself") from None


def _take_away(data: Path) -> None:
    """All that the server has written, but for the lock by which others know that it runs."""
    lost = data.with_name(f"{data.name}-lost")
    lost.mkdir(exist_ok=True)
    for each in data.iterdir():
        if each.name != "lock":
            each.rename(lost / f"{len(list(lost.iterdir()))}-{each.name}")


def _family(supervisor: int) -> list[int]:
    return [supervisor, *(one.pid for one in psutil.Process(supervisor).children(recursive=True))]
