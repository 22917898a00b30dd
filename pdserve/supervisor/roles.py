"""The roles of a graph, from start to stop: each in a restart loop, ready when registered, stopped in waves."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from pdserve.graph import BOOT_VARIABLE, ProcessSpec, stop_waves
from pdserve.messages import Instance, Role, SlotState
from pdserve.process.identity import instance_id, new_boot
from pdserve.process.lifecycle import SUPERVISOR_DIED
from pdserve.supervisor.child import Child, Exit
from pdserve.supervisor.guardian import Guardian
from pdserve.supervisor.output import ProcessOutput
from pdserve.supervisor.progress import StartProgress
from pdserve.supervisor.readiness import RegisteredInstances
from pdserve.supervisor.restarts import (
    LOADING_PATIENCE,
    CannotStart,
    ProcessState,
    RestartLoop,
    RestartPolicy,
    Service,
    failed_starts,
)
from pdserve.tasks import forever

log = logging.getLogger(__name__)


class RoleService(Service):
    """A role, as the restart loop sees it."""

    def __init__(
        self,
        spec: ProcessSpec,
        instances: RegisteredInstances,
        guardian: Guardian,
        on_line: Callable[[str], None],
        ready_roles: set[Role],
    ) -> None:
        """`ready_roles`, of which a process has been ready, is shared by all."""
        self.name = spec.name
        self.spec = spec
        self.instance: Instance | None = None
        self._instances = instances
        self._guardian = guardian
        self._on_line = on_line
        self._ready_roles = ready_roles
        self._instance_id = ""

    @property
    def kind_was_ready(self) -> bool:
        return self.spec.role in self._ready_roles

    def spawn(self) -> Child:
        boot = new_boot()
        self.instance, self._instance_id = None, instance_id(self.name, boot)
        return Child.start(
            self.name,
            self.spec.command,
            self._on_line,
            env={**self.spec.env, BOOT_VARIABLE: boot},
            guardian=self._guardian,
            wave=self.spec.node.stops,
            # The guardian stops it then, when its turn has come; should that be gone too, the role ends by itself.
            parent_death=SUPERVISOR_DIED,
        )

    async def watch(self, child: Child, ready: Callable[[], None]) -> str:
        self.instance = await self._instances.until_registered(self._instance_id, child.pid)
        self._ready_roles.add(self.spec.role)
        ready()
        seconds = await self._instances.until_missing(self.instance)
        return f"its process {child.pid} lives, but its lease in etcd ended {seconds:g} s ago"

    async def ended(self, exit_: Exit) -> None:
        if self.instance and exit_.code:
            await self._instances.remove(self.instance)


class RoleSupervisor:
    """Keeps roles running until `stop`, or until one of them cannot be kept running."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        instances: RegisteredInstances,
        output: ProcessOutput,
        guardian: Guardian,
        policy: RestartPolicy,
    ) -> None:
        ready_roles: set[Role] = set()
        self._instances = instances
        self._output = output
        self._services = {
            spec.name: RoleService(spec, instances, guardian, partial(self._show, spec.name), ready_roles)
            for spec in specs
        }
        self._loops = {
            name: RestartLoop(service, policy, self._changed) for name, service in self._services.items()
        }
        self._progress: StartProgress | None = None
        self._unreported: set[str] = set()
        self._to_report = asyncio.Event()
        self._stop = asyncio.Event()
        self._cause: CannotStart | None = None

    async def run(
        self,
        missing: AsyncIterator[str],
        on_ready: Callable[[list[Instance], float], None],
        patience: float,
    ) -> None:
        """Start all roles and return after `stop`, when nothing of them is left. `missing` yields what the frontends
        still lack; then `on_ready` gets the instances and the seconds it took, once. Raises CannotStart."""
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(self._start(missing, on_ready))
            running = [group.create_task(self._run(loop)) for loop in self._loops.values()]
            reporting = group.create_task(forever(self._report, "slot records"))
            await self._stop.wait()
            starting.cancel()
            await self._stop_all(patience)
            await asyncio.gather(*running)
            reporting.cancel()
        if self._cause:
            raise self._cause

    def stop(self) -> None:
        """Let all roles drain and end; the second time, at once."""
        if self._stop.is_set():
            log.warning("killing what still runs")
            for loop in self._loops.values():
                loop.kill()
        else:
            log.info("stopping: frontends, then decode, then prefill workers (Ctrl-C again: at once)")
            self._stop.set()

    async def _start(
        self, missing: AsyncIterator[str], on_ready: Callable[[list[Instance], float], None]
    ) -> None:
        with StartProgress(self._output, list(self._loops)) as progress:
            self._progress = progress
            try:
                async with asyncio.TaskGroup() as group:
                    reminding = group.create_task(progress.remind())
                    await asyncio.gather(*(loop.settled.wait() for loop in self._loops.values()))
                    async for what in missing:
                        progress.waiting_for(what)
                    reminding.cancel()
            finally:
                self._progress = None
        if absent := [service.name for service in self._services.values() if not service.instance]:
            log.warning("ready, but without %s", ", ".join(absent))
        instances = [service.instance for service in self._services.values() if service.instance]
        on_ready(instances, progress.elapsed)

    async def _run(self, loop: RestartLoop) -> None:
        try:
            await loop.run()
        except CannotStart as cause:
            self._cause = self._cause or cause
            self._stop.set()

    async def _stop_all(self, patience: float) -> None:
        """In waves, and at the same time what is not ready: it has nothing to drain. The others may serve, also before
        all of the graph is ready, which it never is where one worker is always killed while it starts."""
        ready = [name for name, loop in self._loops.items() if loop.state is ProcessState.READY]
        loading = [loop for name, loop in self._loops.items() if name not in ready]

        async def stop_ready() -> None:
            for wave in stop_waves(self._services[name].spec for name in ready):
                await asyncio.gather(*(self._loops[spec.name].stop(patience) for spec in wave))

        await asyncio.gather(stop_ready(), *(loop.stop(LOADING_PATIENCE) for loop in loading))

    def _show(self, name: str, raw: str) -> None:
        line = self._output.line(name, raw)
        if self._progress:
            self._progress.line(name, line.message)

    def _changed(self, loop: RestartLoop) -> None:
        name = loop.service.name
        self._unreported.add(name)
        self._to_report.set()
        if self._progress:
            self._progress.changed(name, loop.state)
        elif loop.state is ProcessState.READY:
            log.info("%s is ready again", name)

    async def _report(self) -> None:
        """Tell the registry what has changed, for ever."""
        while True:
            await self._to_report.wait()
            self._to_report.clear()
            while self._unreported:
                name = next(iter(self._unreported))
                state = self._slot_state(name)
                await self._instances.report(state)
                if state == self._slot_state(name):
                    self._unreported.discard(name)

    def _slot_state(self, name: str) -> SlotState:
        loop = self._loops[name]
        last = loop.history[-1].exit if loop.history else None
        return SlotState(
            name,
            self._services[name].spec.role,
            state=loop.state,
            restarts=loop.restarts,
            failed_starts=0 if loop.state is ProcessState.READY else failed_starts(loop.history),
            end=str(last) if last else "",
            cause=last.cause if last else "",
        )
