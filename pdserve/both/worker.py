"""A worker of role `both`: a decode worker that also pulls prompts from the prefill queue
(docs/decisions/0026-any-worker-can-do-either.md).

Both parts are those of the dedicated workers, on one engine, with one id, lease and drain. Each part gets every step of
the engine, and knows its own requests by their ids."""

import asyncio
import time
from collections.abc import Mapping

import msgspec

from pdserve.contract.messages import Load
from pdserve.contract.records import Role
from pdserve.decode.requests import OWN
from pdserve.decode.worker import DecodeWorker
from pdserve.engine.base import Engine, Step
from pdserve.prefill.prompts import PromptRunner
from pdserve.prefill.pull_policy import POLL_INTERVAL, DecodeLoad
from pdserve.registry import keys
from pdserve.runtime.tasks import Work
from pdserve.util.errors import EngineDead

MAX_UNTAKEN = 3 * POLL_INTERVAL
"""Seconds after which a prompt of this worker counts as untaken: a worker with capacity would have pulled it."""


class BothWorker(DecodeWorker):
    work = Role.BOTH
    follows: tuple[str, ...] = (keys.INSTANCES, keys.NEWCOMERS, keys.SETTINGS)
    without_nats = "each worker prefills the prompts that it decodes"

    def _assemble(self, engine: Engine) -> None:
        super()._assemble(engine)
        self._prompts = PromptRunner(
            self.id,
            self._config,
            engine,
            self._queue,
            self.view,
            self.tracer,
            decode_load=self._decode_load,
            own=self._take_back,
        )
        self._runner.estimator.prefill_tokens = lambda: self._prompts.tokens
        self._runner.is_idle = self._prompts.pulling.is_idle
        self._runner.on_start = self._prompts.pulling.stop_waiting

    def _decode_load(self) -> DecodeLoad:
        requests = self.requests.occupying()
        return DecodeLoad(len(requests), sum(request.local_tokens for request in requests))

    def _take_back(self, request_id: str) -> None:
        """Prefill locally a request of this worker that it pulled itself, because no other worker is idle."""
        if request := self.requests.get(request_id):
            request.resolve(OWN)

    async def _take_back_untaken(self) -> None:
        """While this worker pulls nothing (it drains, or `Pulling.full`), prefill locally those of its prompts that no
        other worker pulls."""
        pulling = self._prompts.pulling
        while True:
            await asyncio.sleep(POLL_INTERVAL)
            since = time.monotonic() - MAX_UNTAKEN
            for request in self.requests if pulling.full or pulling.draining else ():
                if request.awaits_answer and request.asked < since and not request.prefiller:
                    request.resolve(OWN)

    # life cycle

    def permanent(self) -> Mapping[str, Work]:
        prompts = self._prompts.permanent(self._presence.announced)
        return {**super().permanent(), **prompts, "untaken prompts": self._take_back_untaken}

    def load(self) -> Load:
        load = super().load()
        return msgspec.structs.replace(load, tokens=load.tokens + self._prompts.tokens)

    def _stall_changed(self) -> None:
        super()._stall_changed()
        self._prompts.pulling.set_stalled(self._engine_watch.stalled)

    async def warm_up(self) -> None:
        await self._queue.expect_addressed(self.id)
        await self._presence.warm_up(self.view, self._warm_both_ways)

    async def _warm_both_ways(self) -> None:
        reads = self.settings.current.remote_prefill
        await asyncio.gather(self._prompts.warm(), *([self._warm_up.tried()] if reads else []))

    async def drain(self) -> None:
        self._prompts.pulling.draining = True
        await asyncio.gather(super().drain(), self._prompts.drain())

    async def engine_died(self, death: EngineDead) -> None:
        await self._prompts.engine_died(death)
        await super().engine_died(death)

    async def _read_step(self, step: Step) -> None:
        await super()._read_step(step)
        await self._prompts.read_step(step)
