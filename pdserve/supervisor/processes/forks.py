"""The supervisor's side of the fork server (`fork_server.py`)."""

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from pdserve.supervisor.processes import fork_server
from pdserve.supervisor.processes.child import Child
from pdserve.supervisor.processes.exits import ForkedProcess, Guardian

logger = logging.getLogger(__name__)

WORKER_MODULES = ("pdserve.engine.vllm.api",)
FRONTEND_MODULES = (
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.launchers.app",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.models.api_router",
    "vllm.entrypoints.serve.lora.api_router",
    "vllm.v1.engine.async_llm",
)
"""Modules that the fork server imports once for all roles: vLLM, but no part of pdserve with per-process state."""
FORK_WITHIN = 10.0
"""Seconds for the fork server to fork a role; meanwhile the supervisor does nothing else."""
_MARGIN = 16_384
"""Spare bytes in the arguments and in the environment of the fork server, because a forked role overwrites both with
its own."""


class ForkServer:
    """Forks children of this process, which must adopt orphans (`exits.adopt_orphans`). If it fails, its caller starts
    the processes itself: they take longer, and nothing else changes."""

    def __init__(
        self,
        modules: Sequence[str],
        env: Mapping[str, str],
        room: int,
        output: Callable[[str], None],
        guardian: Guardian | None = None,
    ) -> None:
        """Begin to import `modules`. `env` has the variables that libraries read when they are loaded. `room`: bytes by
        which a role's environment may be longer than this process's."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", fork_server.__name__, str(theirs.fileno()), *modules]
            self._child = Child(
                "fork-server",
                [*command, " " * _MARGIN],
                output,
                env={**env, "PDSERVE_PADDING": " " * (room + _MARGIN)},
                guardian=guardian,
                pass_fds=(theirs.fileno(),),
            )
        self.pid = self._child.pid
        self._usable = False

    async def ready(self) -> None:
        """Wait until the modules are imported, or the fork server has failed."""
        logger.info("importing vLLM once for all processes (Ctrl-C stops)")
        self._socket.setblocking(False)
        with suppress(OSError):
            answer = await asyncio.get_running_loop().sock_recv(self._socket, len(fork_server.READY))
            self._usable = answer == fork_server.READY
        self._socket.settimeout(FORK_WITHIN)
        if not self._usable:
            self._warn("it ended")

    def fork(
        self, command: Sequence[str], env: Mapping[str, str], output: int, parent_death: int
    ) -> ForkedProcess | None:
        """Run `python -m MODULE ARGUMENTS` with exactly this environment, and with the descriptor `output` as stdout
        and stderr. Return None if the fork server cannot."""
        if not self._usable:
            return None
        request = json.dumps([os.getpid(), parent_death, command, dict(env)]).encode()
        try:
            socket.send_fds(self._socket, [request], [output])
            return ForkedProcess(int(self._socket.recv(64)))
        except (OSError, ValueError) as error:
            self._usable = False
            self._socket.close()  # a process that is forked after this cannot report, and ends
            self._child.kill()
            self._warn(str(error))
            return None

    async def close(self) -> None:
        self._socket.close()
        self._child.kill()
        await self._child.wait()

    def _warn(self, why: str) -> None:
        lines = "".join(f"\n  {line}" for line in self._child.last_lines()[-5:])
        logger.warning(
            "fork server failed (%s); each role imports vLLM itself, which takes longer%s", why, lines
        )
