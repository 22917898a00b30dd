"""Child processes that end with their parent. Imports only the standard library, because `pdserve install` uses it."""

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
    """Return a command that runs `command`, which gets signal `number` when this process dies. Start it from the main
    thread: Linux sends the signal when the starting thread ends. (With gRPC's threads, Popen's `preexec_fn` may
    crash.)"""
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), str(int(number)), *command]
