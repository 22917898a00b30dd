"""How far a benchmark is, and how long it still takes: a bar in a terminal, a line for each phase in a log."""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve import clock

_TICK = 0.5


class Schedule(AbstractContextManager["Schedule"]):
    """Phases that were announced with their expected seconds, and are then gone through in any order.

    Enter it for the display, on stderr. The time left is that of the phases that have not begun, and what is left of
    the running one."""

    def __init__(self, phases: dict[str, float] | None = None) -> None:
        self._left = dict(phases or {})
        self._all = sum(self._left.values())
        self._name, self._began, self._expected = "", 0.0, 0.0
        self._done = 0.0
        terminal = sys.stderr.isatty()
        self._bar = (
            Progress(
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=Console(stderr=True, highlight=False),
                transient=True,
                refresh_per_second=2,
                get_time=self._tick,
            )
            if terminal
            else None
        )
        self._task = self._bar.add_task("", total=1.0) if self._bar else None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def announce(self, phase: str, seconds: float) -> None:
        """Also while others run, as when it is known only then what is to be done."""
        self._left[phase] = self._left.get(phase, 0.0) + seconds
        self._all += seconds

    def cancel(self, phase: str) -> None:
        """It will not be needed."""
        self._all -= self._left.pop(phase, 0.0)

    @contextmanager
    def phase(self, name: str, seconds: float = 0.0) -> Iterator[None]:
        """`seconds` where it was not announced. One at a time."""
        expected = self._left.pop(name, None)
        if expected is None:
            expected, self._all = seconds, self._all + seconds
        self._name, self._began, self._expected = name, time.monotonic(), expected
        if not self._bar:
            self.say(f"{name}{self._time_left()}")
        try:
            yield
        finally:
            self._done += expected
            self._name = ""

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar:
            self._bar.console.print(text)
        else:
            now = time.strftime("%H:%M:%S", time.localtime(clock.unix()))
            print(f"{now}  {text}", file=sys.stderr, flush=True)

    @property
    def seconds_left(self) -> float:
        here = max(0.0, self._expected - (time.monotonic() - self._began)) if self._name else 0.0
        return here + sum(self._left.values())

    def _time_left(self) -> str:
        left = self.seconds_left
        return f" ({told(left)} left)" if left >= 1 else ""

    def _tick(self) -> float:
        """rich asks for the time whenever it draws."""
        if self._bar and self._task is not None and self._all > 0:
            share = 1 - min(1.0, self.seconds_left / self._all)
            task = self._bar.tasks[0]
            task.completed, task.description = share, f"{self._name}{self._time_left()}"
        return time.monotonic()


def told(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
