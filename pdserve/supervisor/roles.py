"""Run the roles of a graph: each in a restart loop, ready when registered, stopped in waves."""

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pdserve.contract.records import Instance, Role, SlotState
from pdserve.plan.graph import BOOT_VARIABLE, GRAPH, ProcessSpec
from pdserve.process.presence import instance_id, new_boot
from pdserve.process.signals import SUPERVISOR_DIED
from pdserve.runtime.tasks import forever, isolate_errors
from pdserve.supervisor.output import ProcessOutput
from pdserve.supervisor.processes.alone import SOCKETS_VARIABLE, make_sockets_folder
from pdserve.supervisor.processes.child import Child, Exit
from pdserve.supervisor.processes.exits import Guardian
from pdserve.supervisor.processes.readiness import RegisteredInstances
from pdserve.supervisor.processes.restarts import (
    LOADING_PATIENCE,
    CannotStart,
    ProcessState,
    RestartLoop,
    RestartPolicy,
    SupervisedProcess,
    failed_starts,
)

logger = logging.getLogger(__name__)

REMIND = 10.0
"""Seconds between two log lines that say which processes the start waits for."""


@dataclass
class SupervisedRole(SupervisedProcess):
    """A role for the restart loop."""

    spec: ProcessSpec
    instances: RegisteredInstances
    guardian: Guardian
    ready_roles: set[Role]
    """Roles of which a process has been ready; all processes share this set."""
    on_line: Callable[[str], None]
    drains_within: float
    instance: Instance | None = None
    _instance_id: str = ""
    _sockets_folder: str = ""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def wave(self) -> int:
        return GRAPH[self.spec.role].stops

    @property
    def kind_was_ready(self) -> bool:
        return self.spec.role in self.ready_roles

    @property
    def patience(self) -> float:
        """A role that is missing in etcd gets time to drain, because it may serve requests without reaching etcd."""
        return self.drains_within

    def spawn(self) -> Child:
        boot = new_boot()
        self._remove_sockets()
        self._sockets_folder = make_sockets_folder(self.spec.env.get(SOCKETS_VARIABLE, ""))
        self.instance, self._instance_id = None, instance_id(self.name, boot)
        return Child(
            self.name,
            self.spec.command,
            self.on_line,
            env={**self.spec.env, BOOT_VARIABLE: boot, SOCKETS_VARIABLE: self._sockets_folder},
            guardian=self.guardian,
            wave=self.wave,
            # After the supervisor's death, the guardian stops the role; if it is dead too, the role ends by itself.
            parent_death=SUPERVISOR_DIED,
        )

    async def watch(self, child: Child, ready: Callable[[], None]) -> str:
        self.instance = await self.instances.until_registered(self._instance_id, child.pid)
        self.ready_roles.add(self.spec.role)
        ready()
        seconds = await self.instances.until_missing(self.instance)
        return f"its process {child.pid} runs, but has been missing in etcd for {seconds:g} s"

    def _remove_sockets(self) -> None:
        shutil.rmtree(self._sockets_folder, ignore_errors=True)

    async def ended(self, exit_: Exit) -> None:
        self._remove_sockets()
        if self.instance and exit_.code:
            await self.instances.remove(self.instance)


class RoleSupervisor:
    """Keeps roles running until `stop`, or until one of them cannot be started."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        instances: RegisteredInstances,
        output: ProcessOutput,
        guardian: Guardian,
        policy: RestartPolicy,
        patience: float,
    ) -> None:
        """`patience`: seconds for a role to drain and end."""
        ready_roles: set[Role] = set()
        self._instances = instances
        self._patience = patience
        self._loops = [
            RestartLoop(
                SupervisedRole(
                    spec, instances, guardian, ready_roles, partial(output.line, spec.name), patience
                ),
                policy,
                self._on_change,
            )
            for spec in specs
        ]
        self._began = time.monotonic()
        self._missing = ""
        """What the frontends report as missing."""
        self._reported: dict[str, SlotState] = {}
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._cause: CannotStart | None = None

    async def run(
        self, missing: AsyncIterator[str], on_ready: Callable[[list[Instance], float], None]
    ) -> None:
        """Start all roles; return after `stop`, when all their processes have ended. `missing` yields what the
        frontends still lack; when it ends, `on_ready` gets the instances and the seconds that the start took. Raises
        CannotStart."""
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(self._start(missing, on_ready))
            running = [group.create_task(self._run(loop)) for loop in self._loops]
            reporting = group.create_task(forever(self._report, "slot records"))
            await self._stop.wait()
            starting.cancel()
            await self._stop_all()
            await asyncio.gather(*running)
            reporting.cancel()
        if self._cause:
            raise self._cause

    def stop(self) -> None:
        """Let all roles drain and end. The second call kills them."""
        if self._stop.is_set():
            logger.warning("killing all processes that still run")
            for loop in self._loops:
                loop.kill()
        else:
            logger.info("stopping: frontends, then decode, then prefill workers (Ctrl-C again: at once)")
            self._stop.set()

    async def _start(
        self, missing: AsyncIterator[str], on_ready: Callable[[list[Instance], float], None]
    ) -> None:
        """Log what is missing until all roles are settled and frontends lack nothing. Then call `on_ready`."""
        with isolate_errors("start report"):
            async with asyncio.TaskGroup() as group:
                reminding = group.create_task(self._remind())
                await asyncio.gather(*(loop.settled.wait() for loop in self._loops))
                try:
                    async for self._missing in missing:
                        pass
                except CannotStart as cause:
                    self._give_up(cause)
                    return
                finally:
                    reminding.cancel()
            roles = [loop.process for loop in self._loops]
            if absent := [role.name for role in roles if not role.instance]:
                logger.warning("ready, but without %s", ", ".join(absent))
            on_ready([role.instance for role in roles if role.instance], time.monotonic() - self._began)

    async def _remind(self) -> None:
        names = [loop.process.name for loop in self._loops]
        logger.info("starting %s (Ctrl-C stops)", ", ".join(names))
        while True:
            await asyncio.sleep(REMIND)
            waiting = [
                f"{loop.process.name} ({loop.state})" for loop in self._loops if not loop.settled.is_set()
            ]
            seconds = time.monotonic() - self._began
            logger.info("%.0f s so far, waiting for %s", seconds, ", ".join(waiting) or self._missing)

    async def _run(self, loop: RestartLoop[SupervisedRole]) -> None:
        try:
            await loop.run()
        except CannotStart as cause:
            self._give_up(cause)

    def _give_up(self, cause: CannotStart) -> None:
        self._cause = self._cause or cause
        self._stop.set()

    async def _stop_all(self) -> None:
        """Stop the ready roles in waves, and at the same time the others, which have no requests to drain."""
        ready = [loop for loop in self._loops if loop.state is ProcessState.READY]
        loading = [loop for loop in self._loops if loop not in ready]

        async def stop_ready() -> None:
            for wave in sorted({loop.process.wave for loop in ready}):
                await asyncio.gather(
                    *(loop.stop(self._patience) for loop in ready if loop.process.wave == wave)
                )

        await asyncio.gather(stop_ready(), *(loop.stop(LOADING_PATIENCE) for loop in loading))

    def _on_change(self, loop: RestartLoop[SupervisedRole]) -> None:
        self._changed.set()
        if loop.state is ProcessState.READY and any(run.ready for run in loop.history):
            logger.info("%s is ready again", loop.process.name)
        elif loop.state is ProcessState.READY:
            logger.info("%s is ready after %.0f s", loop.process.name, time.monotonic() - self._began)

    async def _report(self) -> None:
        """Write each change of a role's state into the registry; never returns."""
        while True:
            self._changed.clear()
            for loop in self._loops:
                if (state := _slot_state(loop)) != self._reported.get(state.name):
                    await self._instances.report(state)
                    self._reported[state.name] = state
            await self._changed.wait()


def _slot_state(loop: RestartLoop[SupervisedRole]) -> SlotState:
    last = loop.history[-1].exit if loop.history else None
    return SlotState(
        loop.process.name,
        loop.process.spec.role,
        state=loop.state,
        restarts=loop.restarts,
        failed_starts=0 if loop.state is ProcessState.READY else failed_starts(loop.history),
        end=str(last) if last else "",
        cause=last.cause if last else "",
        since=loop.since,
    )
