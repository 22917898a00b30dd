"""The signals that end a process of the graph, and what they do while it starts. Imports next to nothing: all other
imports of a role come after `end_while_starting`."""

import logging
import os
import signal

log = logging.getLogger(__name__)

STOPPERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""from a supervisor, from Ctrl-C, from a terminal that is closed"""
SUPERVISOR_DIED = signal.SIGUSR1
"""from the kernel. Unhandled, as long as a role is starting, it ends the role; a role that serves drains when the
supervisor's guardian tells it to, in its turn"""


def end_while_starting() -> None:
    """Let `STOPPERS` end this process, with exit code 0, until it has handlers of its own: vLLM's import takes many
    seconds."""
    for number in STOPPERS:
        signal.signal(number, _end)


def _end(number: int, _frame: object) -> None:
    """Nothing is there yet that would have to be left in order."""
    log.info("told to stop while starting (%s)", signal.Signals(number).name)
    os._exit(0)
