"""What the graph is doing until it is ready, told from the log lines of its processes."""

import re
import time
from dataclasses import dataclass, field

from rich.live import Live
from rich.text import Text

from pdserve.supervisor.keeper import State
from pdserve.supervisor.output import Output

REMIND = 15.0
"""seconds without news after which a plain log says what is still loading"""

# vLLM's own words for the stages of a start, with ours for what follows them.
_PHASES = (
    (re.compile(r"Resolved architecture|Using max model len"), "starting the engine"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the engine's workers"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"Loading weights took|Model loading took"), "allocating KV cache"),
    (re.compile(r"KV cache size"), "warming up"),
    (re.compile(r"init engine .* took"), "registering"),
)


def phase_of(message: str) -> str | None:
    """The phase that a log line announces, if any."""
    return next((phase for pattern, phase in _PHASES if pattern.search(message)), None)


@dataclass
class _Start:
    phase: str = "importing"
    since: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    """how long it took, once ready"""

    def __str__(self) -> str:
        if self.seconds is not None:
            return f"ready after {self.seconds:.0f} s"
        return f"{self.phase} … {time.monotonic() - self.since:.0f} s"


class Progress:
    """A line per process while they start: live on a terminal, else one for each change."""

    def __init__(self, output: Output, names: list[str]) -> None:
        self._output = output
        self._starts = {name: _Start("waiting to start") for name in names}
        self._missing = ""
        self._began = self._told = time.monotonic()
        self._live = Live(
            get_renderable=self._render, console=output.console, refresh_per_second=4, transient=True
        )

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def __enter__(self) -> "Progress":
        if self._output.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._output.quietly(self._live.stop)

    def line(self, name: str, message: str) -> None:
        start = self._starts.get(name)
        phase = phase_of(message)
        if start and phase and start.seconds is None and phase != start.phase:
            start.phase = phase
            self._tell(name)

    def changed(self, name: str, state: State) -> None:
        match state:
            case State.STARTING:
                self._starts[name] = _Start()
            case State.READY:
                self._starts[name].seconds = time.monotonic() - self._starts[name].since
            case State.WAITING | State.STOPPED:
                self._starts[name].phase = str(state)
        self._tell(name)

    def waiting_for(self, missing: str) -> None:
        """All are registered, and this is what the frontend still lacks."""
        if missing != self._missing:
            self._missing = missing
            self._told = time.monotonic()
            if not self._output.console.is_terminal:
                self._output.say(f"waiting for {missing}")

    def remind(self) -> None:
        """To be called now and then, where no live line shows that time goes by."""
        still = [f"{name} {start.phase}" for name, start in self._starts.items() if start.seconds is None]
        if still and time.monotonic() - self._told > REMIND and not self._output.console.is_terminal:
            self._told = time.monotonic()
            self._output.say(f"{self.elapsed:.0f} s so far: {', '.join(still)}")

    def _tell(self, name: str) -> None:
        self._told = time.monotonic()
        if not self._output.console.is_terminal:
            self._output.say(f"{name}: {self._starts[name]}")

    def _render(self) -> Text:
        lines = [f"  {name:<12} {start}" for name, start in self._starts.items()]
        if self._missing:
            lines.append(f"  waiting for {self._missing}")
        return Text("\n".join([f"Starting, {self.elapsed:.0f} s so far (Ctrl-C stops)", *lines]), "dim")
