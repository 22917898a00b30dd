"""A prefill worker that decodes where no decode worker of its model is there, until one is back
(docs/decisions/0050-prefill-workers-stand-in.md).

To decode workers it is a prefill worker. It listens to frontends as a decode worker does; each of them decides when it
sends requests (`frontend/model/workers.py`). It computes their prompts itself: so its engine reads no KV, and starts as
that of any prefill worker."""

from collections.abc import Mapping
from dataclasses import replace

from pdserve.both.worker import BothWorker
from pdserve.config.schema import DecodeConfig
from pdserve.engine.base import Engine
from pdserve.prefill.worker import PrefillWorker
from pdserve.records import ModelCard, Role
from pdserve.registry import keys
from pdserve.registry.view import RegistryView
from pdserve.tasks import Work


class StandIn(BothWorker):
    follows, without_nats = PrefillWorker.follows, PrefillWorker.without_nats

    def _assemble(self, engine: Engine) -> None:
        assert self._config.prefill is not None
        decode = DecodeConfig(engine_args=self._config.prefill.engine_args)
        self._config = replace(self._config, decode=decode)
        super()._assemble(engine)
        self._runner.stands_in = True

    def permanent(self) -> Mapping[str, Work]:
        work = {**super().permanent(), "model archive": self._keep_card}
        del work["untaken prompts"]  # it queues none
        return work

    async def card(self) -> ModelCard | None:
        return None

    async def _keep_card(self) -> None:
        """Keep a copy of a decode worker's card, by which frontends know the model while no decode worker is there.
        Read another one when that worker is gone: it may be newer."""
        await self._presence.announced.wait()
        model, fingerprint, source = self._config.served_model_name, self._engine.facts.fingerprint, ""
        async for _ in self.view.changes():
            workers = self.view.instances(Role.DECODE, model)
            alike = [worker.id for worker in workers if worker.fingerprint == fingerprint]
            if alike and source not in alike:
                async with RegistryView(self._registry, keys.card(model, alike[0])) as registered:
                    for _, card in registered.cards().get(model, []):
                        await self._presence.keep(card)
                source = alike[0]
            elif workers and not alike:
                await self._presence.keep(None)  # the model has other weights now
                source = ""
