"""The fork server of `serve`: imports vLLM once, and forks the roles, which begin with that import done.

It runs as a program: `fork_server.py SOCKET MODULE... PADDING`. It forks twice for each request on the socket, so that
the role is a child of the supervisor, which adopts orphans. It starts no thread, opens no connection and computes
nothing, so that a fork copies no state but modules. It must not import modules of pdserve that have state of their
process, such as metrics or random names.
"""

import ctypes
import gc
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from pdserve.observe import logs
from pdserve.supervisor.processes.guardian import RUN_VARIABLE

READY = b"ready"
"""First message: the modules are imported. Then one for each role: its pid."""
LONGEST = 1 << 20
"""Bytes of a request."""
_PR_SET_PDEATHSIG = 1


def main() -> list[str]:
    """Serve until the supervisor has gone, and exit. In a forked process, return its command."""
    control = socket.socket(fileno=int(sys.argv[1]))
    logs.setup("fork-server", fmt="json")
    gc.disable()  # as in `util/imports.py`
    for name in sys.argv[2:-1]:
        import_module(name)
    with suppress(ImportError):
        import_module(
            "setproctitle"
        ).getproctitle()  # copies the environment elsewhere, so that `_show` may overwrite it here
    gc.collect()
    gc.freeze()  # a collection in a role would copy the pages that it shares with the others
    gc.enable()
    imported = _files(sys.argv[2:-1])
    control.send(READY)
    while True:
        request, outputs, *_ = socket.recv_fds(control, LONGEST, 1)
        if not request or _files(sys.argv[2:-1]) != imported:
            sys.exit()  # the supervisor has gone, or another version was installed, which roles must import themselves
        if (between := os.fork()) == 0:
            between = os.getpid()
            if os.fork() == 0:
                return _become(control, between, outputs[0], *json.loads(request))
            os._exit(0)
        os.close(outputs[0])
        os.waitpid(between, 0)


def _become(
    control: socket.socket,
    between: int,
    output: int,
    supervisor: int,
    parent_death: int,
    command: list[str],
    env: dict[str, str],
) -> list[str]:
    """Make this forked process what `subprocess.Popen` would have started, and report its pid."""
    while os.getppid() == between:
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, parent_death, 0, 0, 0)
    if os.getppid() != supervisor:  # the supervisor has died already
        os._exit(1)
    os.setpgid(0, 0)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(env)
    _show(command, env)
    if (threads := env.get("OMP_NUM_THREADS")) != before and "torch" in sys.modules:
        # the fork server loaded OpenMP, which read the variable then
        sys.modules["torch"].set_num_threads(int(threads or len(os.sched_getaffinity(0))))
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    try:
        control.send(str(os.getpid()).encode())
    except OSError:  # the supervisor has given up, and starts the role itself
        os._exit(1)
    control.close()
    return command


def _files(modules: Sequence[str]) -> list[tuple[int, int]]:
    """Identify the files of imported modules; missing ones are left out."""
    found = []
    for name in modules:
        with suppress(OSError):
            file = os.stat(str(sys.modules[name].__file__))
            found.append((file.st_ino, file.st_mtime_ns))
    return found


def _show(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Overwrite the arguments and the environment of this process in /proc, by which operators, `doctor` and the next
    supervisor recognize a role. The program was started with enough of both (`forks.py`); what does not fit is left
    out."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, environment, environment_end = map(int, fields[45:49])
    names = sorted(env, key=lambda name: name != RUN_VARIABLE)  # the most important first
    _overwrite(arguments, arguments_end, command)
    _overwrite(environment, environment_end, [f"{name}={env[name]}" for name in names])


def _overwrite(start: int, end: int, texts: Sequence[str]) -> None:
    text, room = b"".join(os.fsencode(text) + b"\0" for text in texts), end - start
    ctypes.memmove(start, text[: room - 1].ljust(room, b"\0"), room)


if __name__ == "__main__":
    _, _, module, *arguments = main()
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
