"""Children that end with their parent. The standard library alone: an install needs it before anything is there."""

import os
import signal
import sys
from collections.abc import Sequence

_TIED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]), 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)  # the parent has died already
os.execvp(sys.argv[3], sys.argv[3:])
"""


def tied_command(command: Sequence[str], number: signal.Signals = signal.SIGTERM) -> list[str]:
    """A command that gets this signal when the process that runs it dies: the thread that starts it must be the main
    thread. Not by Popen's `preexec_fn`: beside threads of gRPC, code between fork and exec crashes now and then."""
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), str(int(number)), *command]
