"""The stand-in: a prefill worker that decodes while no decode worker of its model is available
(docs/decisions/0050-prefill-workers-stand-in.md).

To decode workers it is a prefill worker. It also listens for frontends, and registers its address for them once a model
card shows that its engine gives the same responses as the model's decode workers. Each frontend decides when to send it
requests (`frontend/workers/pool.py`). The stand-in prefills all prompts locally, so its engine reads no KV."""

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace

from pdserve.both.worker import BothWorker
from pdserve.config.engine_args.arguments import RESPONSE_ARGUMENTS, arguments
from pdserve.config.schema import DecodeConfig
from pdserve.contract.records import ModelCard, Role
from pdserve.engine.base import Engine
from pdserve.prefill.worker import PrefillWorker
from pdserve.registry import keys
from pdserve.registry.view import RegistryView
from pdserve.runtime.tasks import Work

logger = logging.getLogger(__name__)


class StandIn(BothWorker):
    follows, without_nats = PrefillWorker.follows, PrefillWorker.without_nats

    def _assemble(self, engine: Engine) -> None:
        assert self._config.prefill is not None
        decode = DecodeConfig(engine_args=self._config.prefill.engine_args)
        self._config = replace(self._config, decode=decode)
        super()._assemble(engine)
        self._runner.is_stand_in = True

    def permanent(self) -> Mapping[str, Work]:
        reports = self._prompts.prefix_reports.report
        work = {**super().permanent(), "model card": self._keep_card, "prefix reports": reports}
        del work["untaken prompts"]  # a stand-in queues no prompts
        return work

    async def start(self, stack: AsyncExitStack) -> None:
        """Register without an address, because no model card has been compared yet."""
        await super().start(stack)
        await self._presence.set_address("")

    async def card(self) -> ModelCard | None:
        await self._archive.make()  # for frontends that start while no decode worker is available
        return None

    async def _keep_card(self) -> None:
        """Keep a copy of a model card, from which frontends know the model while no decode worker is available. At the
        start, copy anyone's card; later, a decode worker's, and when that worker leaves, another decode worker's."""
        await self._presence.announced.wait()
        model, fingerprint, source = self._config.served_model_name, self._engine.facts.fingerprint, ""
        for owner, card in await self._cards(""):
            if card.fingerprint == fingerprint:
                await self._compare(owner, card)
        async for _ in self.view.changes():
            workers = self.view.instances(Role.DECODE, model)
            alike = [worker.id for worker in workers if worker.fingerprint == fingerprint]
            if alike and source not in alike:
                for owner, card in await self._cards(alike[0]):
                    await self._compare(owner, card)
                source = alike[0]
            elif workers and not alike:
                await self._presence.set_card(None)  # the model has other weights now
                source = ""

    async def _cards(self, owner: str) -> list[tuple[str, ModelCard]]:
        model = self._config.served_model_name
        async with RegistryView(self._registry, keys.card(model, owner)) as registered:
            return registered.cards().get(model, [])

    async def _compare(self, owner: str, card: ModelCard) -> None:
        """Stand in for the workers of this model card only if this engine gives the same responses."""
        assert self._stream is not None
        assert self._config.decode is not None
        ours, theirs = self._config.decode.engine_args, card.engine_args
        differ = [
            name
            for name in sorted(RESPONSE_ARGUMENTS)
            if ours.get(name, default := arguments()[name].default) != theirs.get(name, default)
        ]
        if differ:
            logger.warning(
                "this worker does not stand in: its %s is not that of %s", ", ".join(differ), owner
            )
        await self._presence.set_address("" if differ else self._stream.address)
        await self._presence.set_card(None if differ else card)
