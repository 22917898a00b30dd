"""The roles of a graph, from start to stop: readiness, restarts, the order of stopping."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from pdserve.graph import ProcessSpec, stop_waves
from pdserve.messages import Instance, Role
from pdserve.supervisor.backoff import Policy
from pdserve.supervisor.guardian import Guardian
from pdserve.supervisor.keeper import LOADING_PATIENCE, GaveUp, Keeper, State, Watcher
from pdserve.supervisor.output import Output
from pdserve.supervisor.progress import Progress
from pdserve.supervisor.rollcall import Roll
from pdserve.tasks import forever

log = logging.getLogger(__name__)


class Supervision(Watcher):
    """Keeps jobs alive until `stop` or until one of them can't be kept alive."""

    def __init__(
        self, jobs: Sequence[ProcessSpec], roll: Roll, output: Output, guardian: Guardian, policy: Policy
    ) -> None:
        self._jobs = jobs
        self._roll = roll
        self._output = output
        self._keepers = {job.name: Keeper(job, roll, self, guardian, policy) for job in jobs}
        self._progress: Progress | None = None
        self._ready_roles: set[Role] = set()
        self._unreported: set[str] = set()
        self._to_report = asyncio.Event()
        self._stop = asyncio.Event()
        self._cause: GaveUp | None = None

    async def run(
        self,
        healthy: AsyncIterator[str],
        on_ready: Callable[[list[Instance], float], None],
        beside: Sequence[Coroutine[Any, Any, None]],
        patience: float,
    ) -> None:
        """Start all jobs and return after `stop`, when nothing of them is left. `on_ready` gets the instances
        and the seconds it took, once. `beside` runs as long. Raises GaveUp."""
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(self._start(healthy, on_ready))
            keeping = [group.create_task(self._keep(each)) for each in self._keepers.values()]
            others = [group.create_task(each) for each in (*beside, forever(self._report, "slot records"))]
            await self._stop.wait()
            starting.cancel()
            await self._stop_all(patience)
            await asyncio.gather(*keeping)
            for task in others:
                task.cancel()
        if self._cause:
            raise self._cause

    def stop(self) -> None:
        """Let everything drain and end; the second time, at once."""
        if self._stop.is_set():
            log.warning("killing what still runs")
            for keeper in self._keepers.values():
                keeper.kill()
        else:
            log.info("stopping: frontends, then decode, then prefill workers (Ctrl-C again: at once)")
            self._stop.set()

    async def _stop_all(self, patience: float) -> None:
        """In waves, and at the same time what is not ready: it has nothing to drain. The others may serve, also before
        all of the graph is ready, which it never is where one worker is always killed while it starts."""
        ready = [job for job in self._jobs if self._keepers[job.name].ready.is_set()]
        loading = [keeper for keeper in self._keepers.values() if keeper.job not in ready]

        async def stop_ready() -> None:
            for wave in stop_waves(ready):
                await asyncio.gather(*(self._keepers[job.name].stop(patience) for job in wave))

        await asyncio.gather(stop_ready(), *(keeper.stop(LOADING_PATIENCE) for keeper in loading))

    def line(self, name: str, raw: str) -> None:
        line = self._output.line(name, raw)
        if self._progress:
            self._progress.line(name, line.message)

    def changed(self, name: str, state: State) -> None:
        self._unreported.add(name)
        self._to_report.set()
        if state is State.READY:
            self._ready_roles.add(self._keepers[name].job.role)
        if self._progress:
            self._progress.changed(name, state)
        elif state is State.READY:
            log.info("%s is ready again", name)

    def was_ready(self, role: Role) -> bool:
        return role in self._ready_roles

    async def _start(
        self, healthy: AsyncIterator[str], on_ready: Callable[[list[Instance], float], None]
    ) -> None:
        keepers = self._keepers.values()
        with Progress(self._output, list(self._keepers)) as progress:
            self._progress = progress
            try:
                async with asyncio.TaskGroup() as group:
                    reminding = group.create_task(_remind(progress))
                    await asyncio.gather(*(each.settled.wait() for each in keepers))
                    async for missing in healthy:
                        progress.waiting_for(missing)
                    reminding.cancel()
            finally:
                self._progress = None
        if absent := [each.job.name for each in keepers if not each.instance]:
            log.warning("ready, but without %s", ", ".join(absent))
        on_ready([each.instance for each in keepers if each.instance], progress.elapsed)

    async def _report(self) -> None:
        """Tell the registry what has changed, for ever."""
        while True:
            await self._to_report.wait()
            self._to_report.clear()
            while self._unreported:
                name = next(iter(self._unreported))
                state = self._keepers[name].state_of_slot
                await self._roll.report(state)
                if state == self._keepers[name].state_of_slot:
                    self._unreported.discard(name)

    async def _keep(self, keeper: Keeper) -> None:
        try:
            await keeper.run()
        except GaveUp as cause:
            self._cause = self._cause or cause
            self._stop.set()


async def _remind(progress: Progress) -> None:
    while True:
        await asyncio.sleep(1)
        progress.remind()
