"""What happens on a terminal."""

import fcntl
import os
import pty
import shlex
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence


class Terminal:
    """A pseudo terminal in which bash runs a command and then says `the exit code is N`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._script = f"{shlex.join(command)}; echo the exit code is $?"
        self._env = {**env, "TERM": "xterm-256color", "COLUMNS": "100"}
        self.text = ""

    def __enter__(self) -> "Terminal":
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            ["bash", "-c", self._script],
            env=self._env,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours >= 0:
            os.close(self._ours)
        self._process.wait(30)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def hang_up(self) -> None:
        os.close(self._ours)
        self._ours = -1

    def until(self, words: str, within: float = 90) -> None:
        deadline = time.monotonic() + within
        while words not in self.text:
            assert time.monotonic() < deadline, self.text[-3000:]
            try:
                self.text += os.read(self._ours, 1 << 16).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # all of the other side is gone
                assert words in self.text, self.text[-3000:]
