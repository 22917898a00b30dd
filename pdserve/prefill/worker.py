"""The prefill worker: what it does in each stage of its life (`process/life.py`); its prompts are in `prompts.py`."""

from collections.abc import Mapping

import msgspec

from pdserve.contract.messages import Load
from pdserve.contract.records import Role
from pdserve.engine.base import Engine, Step
from pdserve.prefill.prompts import PromptRunner
from pdserve.process.worker import EngineWorker
from pdserve.registry import keys
from pdserve.runtime.tasks import Work
from pdserve.util.errors import EngineDead


class PrefillWorker(EngineWorker):
    work = Role.PREFILL
    follows = (*keys.instances(Role.DECODE), keys.NEWCOMERS)
    without_nats = "no prompts arrive; decode workers prefill locally"

    def _assemble(self, engine: Engine) -> None:
        self._prompts = PromptRunner(self.id, self._config, engine, self._queue, self.view, self.tracer)

    def load(self) -> Load:
        return msgspec.structs.replace(super().load(), tokens=self._prompts.tokens)

    def permanent(self) -> Mapping[str, Work]:
        reports = {"prefix reports": self._prompts.prefix_reports.report}
        return {**super().permanent(), **self._prompts.permanent(self._presence.announced), **reports}

    def _stall_changed(self) -> None:
        super()._stall_changed()
        self._prompts.pulling.set_stalled(self._engine_watch.stalled)

    async def warm_up(self) -> None:
        await self._queue.expect_addressed(self.id)
        await self._presence.warm_up(self.view, self._prompts.warm)

    async def drain(self) -> None:
        self._prompts.pulling.draining = True
        await self._presence.drain()
        await self._prompts.drain()

    async def engine_died(self, death: EngineDead) -> None:
        await self._prompts.engine_died(death)

    async def _read_step(self, step: Step) -> None:
        await self._prompts.read_step(step)
