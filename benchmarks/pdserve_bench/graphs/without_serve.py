"""A graph without `serve`: NATS, etcd and each role in its own process, restarted on exit as by systemd."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pdserve.config.load import load
from pdserve.contract.records import Role
from pdserve.runtime.tasks import TaskOwner
from pdserve.supervisor.processes.exits import wait_for_exit
from pdserve.supervisor.processes.readiness import until_frontends_ready
from pdserve.supervisor.servers.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer
from pdserve.supervisor.state import GraphRecord
from pdserve.util.errors import PdserveError, Unavailable
from pdserve.util.net import free_port
from pdserve_bench.graphs.launch import (
    PDSERVE,
    START_WITHIN,
    RunningGraph,
    ServerRun,
    derive,
    family,
    with_thresholds,
)
from pdserve_bench.graphs.simulated import write
from pdserve_bench.graphs.watch import GraphWatch

POLL_INTERVAL = 0.5
"""Seconds between two checks for processes that have ended."""
STOP_WITHIN = 60.0
ROLES = (Role.FRONTEND, Role.DECODE, Role.PREFILL)


@dataclass
class GraphWithoutServe(RunningGraph):
    """This process supervises the roles."""

    servers: Sequence[EmbeddedServer]
    roles: dict[str, ServerRun] = field(default_factory=dict)
    """Processes by name, as `decode-0`."""
    restarts: bool = True

    @property
    def alive(self) -> bool:
        return True

    def family(self) -> list[psutil.Process]:
        pids = [run.process.pid for run in self.roles.values()]
        pids += [server.child.pid for server in self.servers if server.child]
        return [process for pid in pids for process in family(pid)]

    def group(self, name: str) -> int:
        """Return the process group of `decode-0`, `nats` and the like."""
        if name in self.roles:
            return self.roles[name].process.pid
        (child,) = (server.child for server in self.servers if server.name == name)
        assert child
        return child.pid

    async def keep(self) -> None:
        """Restart processes that end. Never returns."""
        while True:
            await asyncio.sleep(POLL_INTERVAL)
            for run in self.roles.values() if self.restarts else ():
                if run.process.poll() is not None:
                    run.start()
            for server in self.servers if self.restarts else ():
                if server.child and not server.child.running:
                    await server.child.wait()
                    with suppress(PdserveError):
                        await server.start()

    async def until_ready(self, watch: GraphWatch) -> None:
        """Raises Unavailable with the ends of logs if a role does not start."""
        deadline = time.monotonic() + START_WITHIN
        while len(await watch.instances()) < len(self.roles):
            ended = [run.text[-2000:] for run in self.roles.values() if run.process.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise Unavailable("the graph did not start:\n" + "\n".join(ended))
            await asyncio.sleep(0.1)
        frontends = sum(name.startswith(Role.FRONTEND) for name in self.roles)
        async for _ in until_frontends_ready(self.graph.url, frontends):
            pass

    async def stop(self) -> None:
        """Stop the roles as systemd does, frontends first. Raises Unavailable if one exits with an error."""
        self.restarts, wrong = False, []
        for role in ROLES:
            runs = {name: run for name, run in self.roles.items() if name.startswith(role)}
            for run in runs.values():
                run.process.send_signal(signal.SIGTERM)
            for name, run in runs.items():
                async with asyncio.timeout(STOP_WITHIN):
                    code = await wait_for_exit(run.process)
                wrong += [f"{name} ended with {code} on SIGTERM"] * (code != 0)
        if wrong:
            raise Unavailable("; ".join(wrong))


@asynccontextmanager
async def started_without_serve(
    file: Path,
    folder: Path,
    say: Callable[[str], None],
    *,
    workers: int = 1,
    frontends: int = 0,
    dtype: str = "",
    variables: Mapping[str, str] | None = None,
    **_: Any,
) -> AsyncIterator[GraphWithoutServe]:
    """`started` without `serve`. `frontends` 0: as many as workers. Raises Unavailable and ConfigError."""
    state_dir = folder / "state"
    os.environ.setdefault("GODEBUG", "multipathtcp=0")  # multipath TCP cannot be cut
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(EmbeddedNats(state_dir))
        etcd = await stack.enter_async_context(EmbeddedEtcd(state_dir))
        ports = free_port("127.0.0.1"), free_port("127.0.0.1", 16 * workers)
        sections = with_thresholds(derive(file, workers, *ports, dtype))
        sections["Graph"] |= {"nats": nats.url, "etcd": etcd.url}
        config = load(ours := write(sections, folder / "graph.yaml"), {})
        assert config.frontend
        url, model = f"http://127.0.0.1:{config.frontend.port}", config.served_model_name
        record = GraphRecord(os.getpid(), str(ours), model, "bench", etcd.url, nats.url, url)
        graph = GraphWithoutServe(record, state_dir, (nats, etcd))
        for role in ROLES:
            for number in range(frontends if frontends and role is Role.FRONTEND else workers):
                name, own = f"{role.value}-{number}", {"PDSERVE_STATE_DIR": str(state_dir)}
                command = [*PDSERVE, role.value, "-f", str(ours), "--index", str(number)]
                graph.roles[name] = run = ServerRun(
                    command, state_dir / "logs" / f"{name}.log", {**(variables or {}), **own}
                )
                run.start()
                stack.push_async_callback(run.stop)
        watch = await stack.enter_async_context(GraphWatch())
        await watch.move(record)
        await graph.until_ready(watch)
        async with TaskOwner() as tasks:
            tasks.forever(graph.keep, "restarts")
            yield graph
            await graph.stop()
