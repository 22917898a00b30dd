"""The signals that end a process of the graph, what they do while it starts, and its signs of life. This module
imports next to nothing: all other imports of a role come after `end_while_starting`."""

import logging
import os
import signal

log = logging.getLogger(__name__)

_HANG_UP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
STOPPERS = (signal.SIGTERM, signal.SIGINT, *_HANG_UP)
"""from a supervisor, from Ctrl-C, from a terminal that is closed, unless `nohup` made this process ignore that"""
SUPERVISOR_DIED = signal.SIGUSR1
"""from the kernel, when the supervisor ends. It ends a role that is still starting, which has no handler yet; a role
that serves drains when the supervisor's guardian signals it"""
STARTS, SERVES, DRAINS = b"starts", b"serves", b"drains"
"""signs of life of a process that works: what it does"""


def end_while_starting() -> None:
    """Let `STOPPERS` end this process with exit code 0 until it has its own handlers: vLLM's import takes seconds."""
    for number in STOPPERS:
        signal.signal(number, _end)


def _end(number: int, _frame: object) -> None:
    """End at once: nothing is there yet that would have to be closed."""
    log.info("stopped while starting (%s)", signal.Signals(number).name)
    os._exit(0)
