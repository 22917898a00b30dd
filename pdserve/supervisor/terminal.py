"""Ctrl-C for us alone."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_foreground() -> Iterator[None]:
    """On a terminal, be the foreground process group instead of the one that started us.

    Under `make serve` or a script, Ctrl-C would go to make as well: it would end with an error, and the
    second Ctrl-C would end it before us. Ctrl-Z does nothing then: no shell would be there to bring us back.
    """
    terminal = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else -1
    if terminal < 0 or os.getpgrp() == os.getpid() or os.tcgetpgrp(terminal) != os.getpgrp():
        yield
        return
    before = os.getpgrp()
    # To set the foreground group from outside of it stops the process, unless it ignores this.
    for number in (signal.SIGTTOU, signal.SIGTTIN, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.tcsetpgrp(terminal, os.getpid())
    try:
        yield
    finally:
        os.tcsetpgrp(terminal, before)
