"""How far a benchmark is, and how long it still takes: one moving line in a terminal, else lines. On stderr."""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pdserve import clock

_CTRL_C = 5
"""columns that are left free: a terminal writes `^C` at the end of the line, and in the next one where it is full,
which would not be erased then"""


class Schedule(AbstractContextManager["Schedule"]):
    """Phases that were announced with their expected seconds, and are then gone through in any order, one at a time.

    Enter it for the display. The time left is that of the phases that have not begun, and what is left of the running
    one. Where stderr is no terminal it prints a line when a phase begins."""

    def __init__(self, phases: dict[str, float] | None = None) -> None:
        self._waiting = dict(phases or {})
        self._began = time.monotonic()
        self._name, self._phase_began, self._expected, self._news = "", 0.0, 0.0, ""
        self._console = console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._line,
                console=console,
                transient=True,
                refresh_per_second=2,
                redirect_stdout=sys.stdout.isatty(),  # into the same terminal; a file must get what is printed
            )

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def announce(self, phase: str, seconds: float) -> None:
        """Announce a phase, also while others run. Seconds of the same name add up."""
        self._waiting[phase] = self._waiting.get(phase, 0.0) + seconds

    def cancel(self, phase: str) -> None:
        """Take back a phase that will not be needed."""
        self._waiting.pop(phase, None)

    @contextmanager
    def phase(self, name: str, seconds: float = 0.0) -> Iterator[None]:
        """`seconds` where it was not announced. Raises RuntimeError while another phase runs: the time left of two at a
        time is not their sum."""
        if self._name:
            raise RuntimeError(f"the phase {name!r} begins while {self._name!r} runs")
        self._phase_began, self._news = time.monotonic(), ""
        self._expected = self._waiting.pop(name, seconds)
        self._name = name
        if not self._live:
            self.say(self._text())
        try:
            yield
        finally:
            self._name = self._news = ""

    def update(self, news: str) -> None:
        """What the running phase sees, as `12 req/s, TTFT 80 ms`: in the line that moves."""
        self._news = news

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._live and self._live.is_started:
            self._live.console.print(Text(text))
        else:
            now = time.strftime("%H:%M:%S", time.localtime(clock.unix()))
            print(f"{now}  {text}", file=sys.stderr, flush=True)

    @property
    def seconds_left(self) -> float:
        """Never below 0: a phase that takes longer than expected is taken to end at any moment."""
        return max(0.0, self._expected - self._in_phase()) + sum(list(self._waiting.values()))

    def _in_phase(self) -> float:
        return time.monotonic() - self._phase_began if self._name else self._expected

    def _text(self) -> str:
        """Describe the running phase."""
        left = f" ({duration(self.seconds_left)} left)" if self._name and self.seconds_left >= 1 else ""
        return f"{self._name}{left}" + (f"  {self._news}" if self._news else "")

    def _line(self) -> Text:
        """Asked for whenever it is drawn."""
        spent, left = time.monotonic() - self._began, self.seconds_left
        share = f"{min(0.99, spent / (spent + left)):.0%} " if left and spent else ""
        line = Text(f"{share}{duration(spent)}  {self._text()}", no_wrap=True)
        line.truncate(max(30, self._console.width - _CTRL_C), overflow="ellipsis")
        return line


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
