"""One process of the graph: started in a process group of its own, its output read line by line, its group
ended.

The group stays in the supervisor's session: with a session for each, Linux's autogroup makes every role a
scheduling group of its own, and spinning workers then starve the others (FACTS: ten times the TTFT).
"""

import asyncio
import codecs
import contextlib
import logging
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from pdserve.graph import ProcessSpec
from pdserve.process.lifecycle import SUPERVISOR_DIED
from pdserve.supervisor.exits import dies_with_parent, end_group, exit_of
from pdserve.supervisor.guardian import members, shared_memory

log = logging.getLogger(__name__)

CONFIG_ERROR = 2
"""exit code of a role that finds its configuration wrong: starting it again would change nothing"""

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
TAIL = 30
"""lines of output that are kept to tell why a process ended"""
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Ended:
    code: int
    """exit code; negative: the signal"""
    last_lines: tuple[str, ...] = ()

    @property
    def from_outside(self) -> bool:
        """An operator, or the kernel for lack of memory, ended it: that says nothing about the process."""
        return self.code == 0 or -self.code in _FROM_OUTSIDE

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        if self.code == -signal.SIGKILL:
            return "killed by SIGKILL: by somebody, or by the kernel for lack of memory"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-self.code).name}"
        return f"killed by signal {-self.code}"


class Process:
    """A running job. Has to be awaited with `wait`, once."""

    def __init__(
        self, job: ProcessSpec, process: "subprocess.Popen[bytes]", on_line: Callable[[str], None]
    ) -> None:
        self.job = job
        self.pid = process.pid
        self._process = process
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._on_line = on_line
        self._memory: set[str] = set()
        self._reader = asyncio.create_task(self._read(), name=f"output of {job.name}")

    @classmethod
    def start(cls, job: ProcessSpec, on_line: Callable[[str], None]) -> Self:
        """To be called in a running loop. `on_line` gets each line of stdout and stderr, in the order
        written, without its end."""
        process = subprocess.Popen(
            job.command,
            env={**os.environ, **job.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            # The guardian stops it then, when its turn has come; should that be gone too, the role ends by itself.
            preexec_fn=dies_with_parent(SUPERVISOR_DIED),
        )
        return cls(job, process, on_line)

    async def wait(self) -> Ended:
        """Wait for its end, and see to it that nothing of its group outlives it."""
        code = await exit_of(self._process)
        await end_group(self.pid, self._memory)
        # Its pipe is at its end now, unless somebody who left the group holds it.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._reader, 1)
        return Ended(code, tuple(self._tail))

    def note_memory(self) -> None:
        """Remember its shared memory: once all of the group is killed, resource tracker included, nobody can tell."""
        self._memory = shared_memory(members(self.pid))

    def ask_to_stop(self) -> None:
        """SIGTERM to the role alone: it stops the processes below it itself, in its own order."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.note_memory()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _read(self) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), self._process.stdout
        )
        try:
            decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
            rest = ""
            while chunk := await stream.read(1 << 16):
                # A progress bar ends its lines with \r; a last line may have no end at all.
                *lines, rest = re.split(r"[\r\n]+", rest + decode(chunk))
                if len(rest) > _LONGEST:
                    lines, rest = [*lines, rest], ""
                self._take(lines)
            self._take([rest])
        finally:
            transport.close()

    def _take(self, lines: list[str]) -> None:
        for line in filter(str.strip, lines):
            self._tail.append(line)
            try:
                self._on_line(line)
            except Exception:  # the pipe must be read on, or the role hangs in its next line
                log.exception("a line of %s could not be taken", self.job.name)
