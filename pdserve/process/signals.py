"""The signals that end a process of the graph, what they do while it starts, and its signs of life. This module
imports next to nothing: all other imports of a role come after `end_while_starting`."""

import logging
import os
import signal
import time

logger = logging.getLogger(__name__)

_HANG_UP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
STOPPERS = (signal.SIGTERM, signal.SIGINT, *_HANG_UP)
"""from a supervisor, from Ctrl-C, from a terminal that is closed, unless `nohup` made this process ignore that"""
SUPERVISOR_DIED = signal.SIGUSR1
"""from the kernel, when the supervisor ends. It ends a role that is still starting, which has no handler yet; a role
that serves drains when the supervisor's guardian signals it"""
SAME_STOP = 0.2
"""seconds within which further signals belong to the same stop: `timeout` signals its child and then its group, and
uvloop 0.21 delivers a signal twice where another comes just before it, as SUPERVISOR_DIED does before the guardian's
SIGTERM (measured: 5 % of such pairs)"""
ENGINE_KILLED = 128 + signal.SIGKILL
"""exit code of a role whose engine something outside killed, such as the kernel for lack of memory"""
STARTS, SERVES, DRAINS = b"starts", b"serves", b"drains"
"""signs of life of a process that works: what it does"""


class Stops:
    """The stops that signals ask for: the first is to drain, the second to end at once."""

    def __init__(self) -> None:
        self.count = 0
        self._last = 0.0
        """time of the last one"""

    def adds(self, number: signal.Signals) -> bool:
        """Whether the signal asks for another stop. SIGHUP only asks for a first: the shell and the kernel both send it
        when a terminal is closed."""
        now = time.monotonic()
        if self.count and (number == signal.SIGHUP or now < self._last + SAME_STOP):
            return False
        self.count, self._last = self.count + 1, now
        return True


def end_while_starting() -> None:
    """Let `STOPPERS` end this process with exit code 0 until it has its own handlers: vLLM's import takes seconds."""
    for number in STOPPERS:
        signal.signal(number, _end)


def _end(number: int, _frame: object) -> None:
    """End at once: nothing is there yet that would have to be closed."""
    logger.info("stopped while starting (%s)", signal.Signals(number).name)
    os._exit(0)
