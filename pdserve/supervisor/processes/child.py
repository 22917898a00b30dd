"""A child process in its own process group: start it, read its output, and kill the whole group when it ends.

All groups stay in the supervisor's session. With a session for each child, Linux's autogroup makes each child a
scheduling group, and spinning workers starve the others (measured: ten times the TTFT).
"""

import asyncio
import codecs
import logging
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

from pdserve.observe import logs
from pdserve.observe.logs import LogLine
from pdserve.process.signals import ENGINE_KILLED
from pdserve.supervisor.processes.exits import Guardian, end_group, wait_for_exit
from pdserve.supervisor.processes.guardian import RUN_VARIABLE, members, shared_memory
from pdserve.util.tied_child import tied_command

logger = logging.getLogger(__name__)

CONFIG_ERROR = 2
"""Exit code of a role with a wrong configuration, which a restart would not change."""
TAIL = 30
"""Last lines of output to keep, to report why a process ended."""
_LONGEST_LINE = 1 << 20
"""Characters; a longer line is split."""
_CAUSE_LIMIT = 300
"""Characters of `Exit.cause`."""
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass(frozen=True)
class Exit:
    """How a child ended."""

    code: int
    """Exit code; negative: the signal."""
    last_lines: tuple[str, ...] = ()

    @property
    def from_outside(self) -> bool:
        """Whether an operator ended the process or its engine (code 0: by SIGTERM), or the kernel did for lack of
        memory."""
        return self.code in (0, ENGINE_KILLED) or -self.code in _FROM_OUTSIDE

    @property
    def cause(self) -> str:
        """The last error in the output, else its last line."""
        output = self._output()
        errors = [line for line in output if line.level in "EC"] or output
        return errors[-1].message.strip().splitlines()[-1][:_CAUSE_LIMIT] if errors else ""

    def tail(self, count: int = 15) -> str:
        """The last lines of output, to append to a log line."""
        lines = [text for line in self._output() for text in line.message.splitlines()][-count:]
        return "\nIts last lines:\n  " + "\n  ".join(lines) if lines else ""

    def _output(self) -> list[LogLine]:
        """The last lines without noise; none for a killed child, which had no time to log the cause."""
        if self.code == -signal.SIGKILL:
            return []
        # without Go's stacks
        printed = takewhile(lambda raw: not raw.startswith("goroutine "), self.last_lines)
        lines = [logs.parse(raw, "") for raw in printed]
        return [line for line in lines if not line.noise and line.message.strip()]

    def __str__(self) -> str:
        if self.code == ENGINE_KILLED:
            return f"exit code {self.code}: its engine was killed"
        if self.code >= 0:
            return f"exit code {self.code}"
        if self.code == -signal.SIGKILL:
            return "killed by SIGKILL: by an operator, or by the kernel for lack of memory"
        with suppress(ValueError):
            return f"killed by {signal.Signals(-self.code).name}"
        return f"killed by signal {-self.code}"


class Child:
    """A running process. Its owner must await `wait`, which reaps it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        output: Callable[[str], None],
        *,
        env: Mapping[str, str] | None = None,
        guardian: Guardian | None = None,
        wave: int = 0,
        parent_death: signal.Signals | None = signal.SIGKILL,
        outlives: bool = False,
    ) -> None:
        """Start the child; raises OSError. Call it in a running loop and in the main thread, because the kernel sends
        the signal `parent_death` when the thread that started the child ends.

        `output` gets each line of stdout and stderr, without its end. `env` is added to this process's environment. The
        guardian stops the child in its `wave` when the supervisor was killed. A child that `outlives` the supervisor
        inherits the reading end of its own pipe, because a broken pipe ends programs written in Go."""
        self.name = name
        self._guardian = guardian
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._memory: set[str] = set()
        mark = {RUN_VARIABLE: f"{guardian.run} {wave}"} if guardian else {}
        out, into = os.pipe()
        try:
            self._process = subprocess.Popen(
                tied_command(command, parent_death) if parent_death else command,
                env={**os.environ, **(env or {}), **mark},
                stdin=subprocess.DEVNULL,
                stdout=into,
                stderr=subprocess.STDOUT,
                process_group=0,
                pass_fds=(out,) if outlives else (),
            )
        except BaseException:
            os.close(out)
            raise
        finally:
            os.close(into)
        self.pid = self._process.pid
        if guardian:
            guardian.watch(self.pid, wave)
        self._reader = asyncio.create_task(self._read(out, output), name=f"output of {name}")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    async def wait(self) -> Exit:
        """Wait for the child's exit, then kill the rest of its group."""
        code = await wait_for_exit(self._process)
        await end_group(self.pid, self._memory)
        if self._guardian:
            self._guardian.forget(self.pid)
        # The pipe is closed now, unless a process that left the group holds it.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reader, 1)
        return Exit(code, self.last_lines())

    async def stop(self, patience: float) -> None:
        """Send SIGTERM to the child, which stops its descendants itself, and SIGKILL after `patience` seconds. `wait`
        kills the rest of the group."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(patience):
                await wait_for_exit(self._process)
        except TimeoutError:
            logger.warning("%s did not stop within %g s; killing it", self.name, patience)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.running:
            self.note_memory()
            with suppress(ProcessLookupError):
                self._process.kill()

    def note_memory(self) -> None:
        """Record the shared memory segments of the group, which cannot be listed after it was killed."""
        self._memory = shared_memory(members(self.pid))

    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._tail)

    async def _read(self, out: int, on_line: Callable[[str], None]) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(out, "rb")
        )
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        rest = ""
        try:
            while chunk := await stream.read(1 << 16):
                # Progress bars end their lines with \r; the last line may have no end.
                *lines, rest = re.split(r"[\r\n]+", rest + decode(chunk))
                if len(rest) > _LONGEST_LINE:
                    lines, rest = [*lines, rest], ""
                self._take(lines, on_line)
            self._take([rest], on_line)
        finally:
            transport.close()

    def _take(self, lines: list[str], on_line: Callable[[str], None]) -> None:
        for line in filter(str.strip, lines):
            self._tail.append(line)
            try:
                on_line(line)
            except Exception:  # keep reading the pipe, or the child blocks when it writes
                logger.exception("cannot process a line of output of %s; dropping it", self.name)
