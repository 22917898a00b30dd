"""Run a command on a pseudo-terminal."""

import os
import pty
import select
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence


class Terminal:
    """A pseudo terminal in which bash runs a command and then prints `the exit code is N`. A thread always reads it,
    because a command waits while 8 KB are unread."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._script = f"{shlex.join(command)}; echo the exit code is $?"
        self._env = {**env, "TERM": "xterm-256color", "COLUMNS": "100"}
        self._said = bytearray()
        self._left = threading.Event()
        self._reading = threading.Thread(target=self._read, name="terminal", daemon=True)

    def __enter__(self) -> "Terminal":
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec <>{os.ttyname(theirs)} >&0 2>&1; {self._script}"],
            env=self._env,
            stdin=theirs,
            start_new_session=True,  # so that bash gets this terminal as its controlling terminal
        )
        os.close(theirs)
        self._reading.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        self._process.wait(30)

    @property
    def text(self) -> str:
        return self._said.decode(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def hang_up(self) -> None:
        if not self._left.is_set():
            self._left.set()
            self._reading.join()
            os.close(self._ours)

    def until(self, words: str, within: float = 200, times: int = 1) -> None:
        deadline = time.monotonic() + within
        while self.text.count(words) < times:
            alive = self._reading.is_alive() and time.monotonic() < deadline
            assert alive or self.text.count(words) >= times, self.text[-3000:]
            time.sleep(0.05)

    def _read(self) -> None:
        while not self._left.is_set():
            if select.select([self._ours], [], [], 0.05)[0]:
                try:
                    self._said += os.read(self._ours, 1 << 16)
                except OSError:  # the other side is closed
                    return
