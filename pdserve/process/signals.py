"""The signals that end a process of the graph, their meaning while it starts, and its heartbeats. This module
imports next to nothing: all other imports of a role come after `end_while_starting`."""

import logging
import os
import signal
import time

logger = logging.getLogger(__name__)

_HANG_UP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
STOPPERS = (signal.SIGTERM, signal.SIGINT, *_HANG_UP)
"""From a supervisor, from Ctrl-C, and from a closed terminal (unless `nohup` made this process ignore that signal)."""
SUPERVISOR_DIED = signal.SIGUSR1
"""The kernel sends it when the supervisor ends. A role that is still starting has no handler for it, and ends. Other
roles wait for SIGTERM from the guardian."""
SAME_STOP = 0.2
"""Seconds within which further signals belong to the same stop. The command `timeout` signals its child and then its
group. uvloop 0.21 may deliver a signal twice if another one came shortly before."""
ENGINE_KILLED = 128 + signal.SIGKILL
"""Exit code of a role whose engine was killed from outside, such as by the kernel for lack of memory."""
STARTS, SERVES, DRAINS = b"starts", b"serves", b"drains"
"""Heartbeats of a working process: its phase."""


class Stops:
    """Counts the stops that signals ask for: at the first, drain; at the second, end at once."""

    def __init__(self) -> None:
        self.count = 0
        self._stopped_at = 0.0

    def adds(self, number: signal.Signals) -> bool:
        """Whether the signal asks for another stop. SIGHUP can only be the first, because the shell and the kernel both
        send it when a terminal is closed."""
        now = time.monotonic()
        if self.count and (number == signal.SIGHUP or now < self._stopped_at + SAME_STOP):
            return False
        self.count, self._stopped_at = self.count + 1, now
        return True


def end_while_starting() -> None:
    """Let `STOPPERS` end this process with exit code 0 until it has its own handlers, since vLLM's import takes
    seconds."""
    for number in STOPPERS:
        signal.signal(number, _end)


def _end(number: int, _frame: object) -> None:
    """End at once: nothing is open yet."""
    logger.info("stopped while starting (%s)", signal.Signals(number).name)
    os._exit(0)
