"""The live screen of `pdserve status --watch` on a terminal, and how the graph's state is read, once or each second."""

import asyncio
import logging
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from pdserve import clock
from pdserve.cli.find import GraphAddress, GraphView
from pdserve.cli.top import screen
from pdserve.observe.graph_state import GraphState, graph_state
from pdserve.observe.pages import read_watched
from pdserve.watch import Connections, Watched

AGAIN = 1.0
"""seconds between two looks at all processes, at least"""


async def states(view: GraphView, etcd: str) -> AsyncIterator[GraphState]:
    """A state each `AGAIN` seconds, for ever."""
    own = Connections()
    own.add("etcd", etcd, view.connected)
    while True:
        began = time.monotonic()
        registered = view.snapshot()
        watched = await read_watched(registered.instances)
        watched["this command"] = Watched(outages=own.outages())
        yield graph_state(*registered, watched)
        await asyncio.sleep(began + AGAIN - time.monotonic())


async def live(view: GraphView, graph: GraphAddress) -> None:
    """Show the graph until `q` or SIGTERM. However it ends, the terminal is restored."""
    # warnings would be written over the screen, which says the same by itself
    logging.getLogger().addHandler(logging.NullHandler())
    loop, shown = asyncio.get_running_loop(), _Screen(graph)
    try:
        async with asyncio.timeout(None) as until:

            def end() -> None:
                if not until.expired():
                    until.reschedule(loop.time())

            loop.add_signal_handler(signal.SIGTERM, end)
            loop.add_signal_handler(signal.SIGWINCH, shown.draw)
            with shown.console.screen(), _keys(lambda typed: end() if typed[:1] in ("q", "Q", "") else None):
                async for state in states(view, graph.etcd):
                    shown.show(state)
    except TimeoutError:
        return


class _Screen:
    def __init__(self, graph: GraphAddress) -> None:
        self.console = Console(highlight=False)
        where = f"etcd {graph.etcd}, namespace {graph.namespace}"
        self._title = " · ".join(filter(None, (graph.url, where)))
        self._state: GraphState | None = None

    def show(self, state: GraphState) -> None:
        self._state = state
        self.draw()

    def draw(self) -> None:
        """Draw the last state, also after a resize."""
        if self._state is not None:
            columns, lines = os.get_terminal_size()  # LINES, which rich prefers, follows no resize
            self.console.size = columns or 80, lines or 25  # a pseudo-terminal may have no size yet
            self.console.update_screen(screen(self._state, self._title, *self.console.size, clock.unix()))


@contextmanager
def _keys(pressed: Callable[[str], None]) -> Iterator[None]:
    """Call `pressed` with each key, without echo, where standard input is a terminal; with '' where it is closed."""
    if not sys.stdin.isatty():
        yield
        return
    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    mode = termios.tcgetattr(number)
    mode[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the screen to the shell
    termios.tcsetattr(number, termios.TCSANOW, mode)
    loop.add_reader(number, lambda: pressed(os.read(number, 16).decode(errors="replace")))
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
