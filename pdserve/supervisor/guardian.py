"""The supervisor's last will: a small process that ends what the supervisor left behind when it was killed.

Runs as a script, with the standard library alone. Reads `+GROUP` and `-GROUP` (process groups) line by line
from stdin. When stdin ends, the supervisor is gone: the groups still listed get SIGTERM, some seconds, and
SIGKILL.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

PATIENCE = float(os.environ.get("PDSERVE_GUARDIAN_PATIENCE", "10"))


class Guardian:
    """The supervisor's side."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, process_group=0
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def watch(self, group: int) -> None:
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # killed by somebody: then the graph goes on without it
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        groups.add(group) if line[0] == "+" else groups.discard(group)
    send(os.kill, groups, signal.SIGTERM)  # to the leaders: each stops those below it in its own order
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and any(alive(group) for group in groups):
        time.sleep(0.05)
    send(os.killpg, groups, signal.SIGKILL)


def send(how: Callable[[int, int], None], groups: Iterable[int], number: int) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            how(group, number)


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
