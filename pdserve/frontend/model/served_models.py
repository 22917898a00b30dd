"""The served models: follows the registry and keeps one processor for each model card."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Container
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING

from pdserve.config.engine_args.installed import installed_vllm
from pdserve.config.schema import AdmissionLimits
from pdserve.contract.live_settings import effective_settings, effective_slo
from pdserve.contract.messages import Load
from pdserve.contract.records import Adapter, Instance, ModelCard, Role
from pdserve.contract.reports import LinkState, ProcessReport
from pdserve.frontend.edge.paths import BY_ID
from pdserve.frontend.edge.request_state import RETRY_AFTER
from pdserve.frontend.edge.response import HttpError
from pdserve.frontend.model import ModelContext, garbage
from pdserve.frontend.model.served_model import ServedModel
from pdserve.frontend.vllm.lora_adapters import servable_adapters
from pdserve.observe.graph_state import graph_state
from pdserve.observe.metrics import INSTANCES, SLOT_READY, USABLE_WORKERS, WORKERS_REPLACED
from pdserve.observe.problems import nodes, readiness
from pdserve.registry.view import RegistryView
from pdserve.runtime.tasks import TaskOwner, forever, isolate_errors, reraise_fatal
from pdserve.util.errors import BadRequest, ConfigError, Unavailable
from pdserve.util.imports import import_without_gc

if TYPE_CHECKING:
    from pdserve.frontend.model.processor import Processor

logger = logging.getLogger(__name__)

RESYNC_INTERVAL = 30.0
"""Seconds after which models are updated even without a registry change, because reports of lost workers expire."""
RETRY_DELAY = 5.0
"""Seconds between two attempts to build a processor."""


@asynccontextmanager
async def serve_models(
    view: RegistryView, context: ModelContext, expected: str, limits: AdmissionLimits
) -> AsyncIterator["ServedModels"]:
    """Follow the registry while entered."""
    async with TaskOwner() as tasks:
        models = ServedModels(view, context, expected, limits, tasks)
        tasks.start(_import_early(), "importing vLLM")
        tasks.forever(models.follow, "served models")
        tasks.forever(partial(garbage.collect_when_idle, models.load), "full garbage collection")
        try:
            yield models
        finally:
            models.cancel_removals()


class ServedModels:
    """A model without a card in the registry is no longer listed. Its requests wait `request_timeout` seconds for a
    worker, which may be restarting; then the model is removed. Its running requests finish.

    `expected` is the model of this frontend's configuration. Until its first worker registers, requests for it and its
    adapters wait in the queue of a placeholder (`_starting`)."""

    def __init__(
        self,
        view: RegistryView,
        context: ModelContext,
        expected: str,
        limits: AdmissionLimits,
        tasks: TaskOwner,
    ) -> None:
        self._limits = limits
        self._view = view
        self._context = context
        self._expected = expected
        self._tasks = tasks
        self._models: dict[str, ServedModel] = {}
        self._starting: ServedModel | None = None
        """holds the requests for `expected` until it has a card"""
        self._retiring: set[ServedModel] = set()
        """removed models whose requests still run"""
        self._mixed: dict[str, set[str]] = {}
        """by model: fingerprints of its workers"""
        self._ready: dict[tuple[str, str], bool] = {}
        """by slot and host: the exported readiness"""
        self._replaced = Counter[tuple[str, Role]]()
        """`view.replaced` as of the last update of the metric"""
        USABLE_WORKERS.labels(expected, Role.DECODE).set(0)

    # lookups

    def find(self, name: str | None) -> ServedModel:
        """Return the model with this name or adapter; for None, the only model. Raises HttpError and BadRequest."""
        names = [card.name for card in self.known()]
        if name is None:
            if len(names) > 1:
                raise BadRequest(f"model must be named; there are: {', '.join(names)}", "model")
            name = names[0] if names else self._expected
        model = self._models.get(name) or self._by_adapter(name)
        if model is None and (name == self._expected or self._is_kept(name)):
            card = ModelCard(self._expected, "")
            model = self._starting = self._starting or ServedModel(card, self._limits)
        if model is not None and not model.problem:
            return model
        if model is not None:
            message = f"{name} is not being served: {self.why_unserved(name)}"
            raise HttpError(503, message, retry_after=RETRY_AFTER)
        hint = f"Valid aliases: {', '.join(names)}." if names else "There are none now."
        raise HttpError(404, f"The model `{name}` does not exist. {hint}", "model")

    def _is_kept(self, name: str) -> bool:
        """Whether `expected` has no card yet, and the name is an adapter of it that was loaded at run time."""
        kept = self._view.adapters(self._expected).get(name)
        return self._expected not in self._models and kept is not None and bool(kept.path)

    def _by_adapter(self, name: str) -> ServedModel | None:
        return next((model for model in self._models.values() if name in model.adapters), None)

    def adapters(self) -> list[tuple[ModelCard, Adapter]]:
        """The adapters of the listed models, each with its model's card."""
        return [(card, each) for card in self.listed() for each in self._models[card.name].adapters.values()]

    def any_for(self, path: str) -> str | None:
        """The name of any model, for a path that all models answer alike; else None."""
        return next((card.name for card in self.known() if BY_ID.fullmatch(path)), None)

    def listed(self) -> list[ModelCard]:
        """The models with a usable worker, sorted by name."""
        return [card for card in self.known() if self._models[card.name].usable_workers]

    def known(self) -> list[ModelCard]:
        """The models with a card in the registry and no problem, usable yet or not, sorted by name."""
        known = [model for model in self._models.values() if model.removal is None and not model.problem]
        return sorted((model.card for model in known), key=lambda card: card.name)

    async def settled(self) -> None:
        """Wait until each model in the registry has a processor or a problem."""
        self._update()
        while unsettled := [each for each in self._models.values() if not each.settled.is_set()]:
            await unsettled[0].settled.wait()

    # for reports

    def why_unserved(self, name: str | None = None) -> str:
        """Why this model is not served; without a name, why no model is. Empty if it (or any) is served."""
        if name is None:
            if any(model.usable_workers for model in self._models.values()):
                return ""
            return "; ".join(
                f"{known}: {self.why_unserved(known)}" for known in self._models or [self._expected]
            )
        model = self._models.get(name)
        if model is None:
            return "no decode worker has registered"
        if model.processor is None:
            return model.problem or "its tokenizer and configuration are being loaded"
        return "" if model.usable_workers else "no decode worker is connected"

    def refuses(self) -> bool:
        """Whether this frontend refuses the configuration of its own model."""
        model = self._models.get(self._expected)
        return model is not None and model.refused

    def usable_workers(self) -> dict[str, int]:
        """By model: number of workers that accept requests now."""
        return {name: model.usable_workers for name, model in sorted(self._models.items())}

    def load(self) -> int:
        """Number of this frontend's requests that need a decode worker."""
        return sum(model.admission.requests for model in self._all())

    def report(self) -> Load:
        waiting = sum(model.waiting for model in self._all())
        backlog = sum(model.backlog for model in self._all())
        return Load(sum(model.running for model in self._all()), waiting, backlog=round(backlog, 3))

    def links(self) -> list[LinkState]:
        return [link for model in self._all() for link in model.links()]

    # following the registry

    async def follow(self) -> None:
        async for _ in self._view.changes(RESYNC_INTERVAL):
            self._update()

    def cancel_removals(self) -> None:
        for model in self._models.values():
            if model.removal is not None:
                model.removal.cancel()

    def _update(self) -> None:
        cards = self._view.cards()
        for name in self._models.keys() - cards.keys():
            self._schedule_removal(name)
            self._mixed.pop(name, None)
        for name, model_cards in cards.items():
            with isolate_errors("served models"):
                self._add(name, _newest(model_cards))
                self._warn_if_mixed(name, model_cards)
        for model in self._all():
            with isolate_errors("served models"):
                self._update_model(model)
        self._count(self._view.instances())

    def _count(self, instances: list[Instance]) -> None:
        running = Counter(instance.role for instance in instances)
        for role in Role:
            INSTANCES.labels(role.value).set(running[role])
        for each in instances:
            if each.role is not Role.FRONTEND:
                # start the series at 0: one that starts at 1 shows no increase
                WORKERS_REPLACED.labels(each.model, each.role)
        for (model, role), more in (self._view.replaced - self._replaced).items():
            if role is not Role.FRONTEND:
                WORKERS_REPLACED.labels(model, role).inc(more)
        self._replaced = self._view.replaced.copy()
        self.show_ready()

    def show_ready(self, silent: Container[str] = ()) -> None:
        """Export which slots' processes are ready. `silent`: ids of processes that do not answer."""
        answers = {each.id: ProcessReport() for each in self._view.instances() if each.id not in silent}
        state = graph_state(
            *self._view.snapshot(), answers | {"": ProcessReport(gone=self._view.lost_processes())}
        )
        before, self._ready = self._ready, readiness(state, nodes(state, 0.0))
        for place in before.keys() - self._ready.keys():
            SLOT_READY.remove(*place)
        for place, ready in self._ready.items():
            SLOT_READY.labels(*place).set(ready)

    def _all(self) -> list[ServedModel]:
        return [*self._models.values(), *self._retiring, *filter(None, [self._starting])]

    def _add(self, name: str, card: ModelCard) -> None:
        model = self._models.get(name)
        if model is not None and model.card.is_interchangeable(card):
            if model.removal is not None:
                model.removal.cancel()
                model.removal = None
            return
        if model is not None:
            logger.info("%s: its model card changed", name)
            self._remove(name)
        self._models[name] = model = ServedModel(card, self._limits)
        model.show()
        if self._starting is not None and name == self._expected:
            self._starting.retire()
            self._starting = None
        serving = forever(lambda: self._serve(model), f"model: {name}", until_done=True)
        self._tasks.start(serving, f"model: {name}")

    def _schedule_removal(self, name: str) -> None:
        model = self._models[name]
        if model.removal is None:
            grace = self._context.request_timeout
            logger.warning("%s: no decode worker is left; requests wait for one for %g s", name, grace)
            model.leaves_zero = name == self._expected or any(
                each.model == name for each in self._view.lost_processes()
            )
            model.removal = asyncio.get_running_loop().call_later(grace, self._remove, name)

    def _remove(self, name: str) -> None:
        model = self._models.pop(name)
        model.hide()
        if model.removal is not None:
            model.removal.cancel()
        model.retired.set()
        self._retiring.add(model)

    def _update_model(self, model: ServedModel) -> None:
        live = self._view.settings()
        files = (worker.settings for worker in self._view.instances(model=model.card.name))
        model.promised = effective_slo(files, live)
        workers = self._workers(model.card)
        places = (each.max_num_seqs for each in workers if not each.is_stand_in)
        model.slots_per_worker = max(places, default=0) or model.slots_per_worker
        kept = self._view.adapters(model.card.name)
        model.adapters = servable_adapters(kept, workers, model.adapters)
        if model.processor is not None:
            model.processor.adapters.set(model.adapters.values())
            frontends = len(self._view.instances(Role.FRONTEND))
            model.processor.workers.update(workers, max(1, frontends), model.adapters | kept)
            model.processor.workers.policy = effective_settings({"router": self._context.router}, live)[
                "router"
            ]
            model.admission.advance()
        if model.retired.is_set():
            model.replace(model.card.name in self._models and not model.usable_workers)

    def _workers(self, card: ModelCard) -> list[Instance]:
        """The decode workers and stand-ins with the card's fingerprint."""
        return [
            worker
            for worker in self._view.instances(model=card.name)
            if worker.fingerprint == card.fingerprint
            and (worker.role.includes(Role.DECODE) or worker.is_stand_in)
        ]

    def _warn_if_mixed(self, name: str, cards: list[tuple[str, ModelCard]]) -> None:
        by_worker = {worker: card.fingerprint for worker, card in cards}
        loaded, before = set(by_worker.values()), self._mixed.get(name)
        self._mixed[name] = loaded
        if len(loaded) > 1 and loaded != before:
            text = "%s: its workers loaded different weights or settings (%s): new requests go only to workers with %s"
            logger.warning(text, name, by_worker, _newest(cards).fingerprint)

    # the life of one model

    async def _serve(self, model: ServedModel) -> None:
        """Build the model's processor, with retries, and keep it until the model is retired and idle."""
        name = model.card.name
        try:
            while not model.retired.is_set():
                try:
                    await self._serve_once(model)
                except (ConfigError, Unavailable) as error:
                    model.problem, model.refused = str(error), isinstance(error, ConfigError)
                except Exception as error:
                    reraise_fatal(error)
                    logger.exception("%s: building its processor failed", name)
                    model.problem = f"internal error: {error}"
                if model.retired.is_set():
                    return
                logger.error("%s is not served: %s", name, model.problem)
                model.settled.set()
                model.admission.advance()
                with suppress(TimeoutError):
                    await asyncio.wait_for(model.retired.wait(), RETRY_DELAY)
        finally:
            self._retiring.discard(model)
            if model.retired.is_set():  # it may have been retired during a failed build
                model.retire()

    async def _serve_once(self, model: ServedModel) -> None:
        name = model.card.name
        async with AsyncExitStack() as stack:
            serve = (await asyncio.to_thread(_import_processor)).serve_model
            serving = serve(model.card, self._context, lambda: self._workers(model.card))
            processor: Processor = await stack.enter_async_context(serving)
            processor.core.on_capacity = model.admission.advance
            try:
                model.processor, model.problem, model.refused = processor, "", False
                processor.adapters.refresh = partial(self._update_model, model)
                model.settled.set()
                self._update_model(model)
                logger.info("%s is being served, up to %d tokens", name, model.card.max_model_len)
                await model.retired.wait()
                with suppress(TimeoutError):
                    await asyncio.wait_for(model.idle(), self._context.max_request_seconds)
                logger.info("%s is no longer served", name)
            finally:
                model.processor = None
                model.admission.advance()


def _newest(cards: list[tuple[str, ModelCard]]) -> ModelCard:
    """Return the newest card of this frontend's vLLM version, or else of any."""
    ours = installed_vllm().version
    return max(
        (card for _, card in cards),
        key=lambda card: (card.vllm_version == ours, card.generation, card.created, card.fingerprint),
    )


async def _import_early() -> None:
    """Import vLLM while the workers start, which takes longer, so that no model waits for the import."""
    try:
        await asyncio.to_thread(_import_processor)
    except ImportError:
        logger.exception("no model can be served: vLLM cannot be imported")


@cache
def _import_processor() -> ModuleType:
    """Import vLLM and freeze all objects of the import: a full garbage collection then takes 20-45 ms instead of 500.
    Call in a thread."""
    module = import_without_gc("pdserve.frontend.model.processor")
    garbage.freeze()
    return module
