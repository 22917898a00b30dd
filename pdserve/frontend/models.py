"""The models of a frontend: each model card becomes a processor, and goes when its card is gone for long."""

import asyncio
import gc
import importlib
import logging
import sys
from contextlib import AsyncExitStack, suppress
from functools import cache
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Self

from pdserve.config.schema import POLICIES, AdmissionLimits
from pdserve.errors import ConfigError, Unavailable
from pdserve.frontend.admission.capacity import Capacity
from pdserve.frontend.admission.control import AdmissionControl
from pdserve.frontend.admission.estimate import RequestEstimate
from pdserve.frontend.body import Refusal
from pdserve.frontend.model import ModelContext
from pdserve.messages import Load, ModelCard, Role
from pdserve.observe.metrics import INSTANCES, WAITING
from pdserve.registry.view import View
from pdserve.tasks import Owner, forever

if TYPE_CHECKING:
    from pdserve.frontend.model.processor import Processor

logger = logging.getLogger(__name__)

RETRY = 5.0
"""seconds between attempts to serve a card that could not be served for want of something"""
EVERYBODY = Capacity(sys.maxsize, sys.maxsize, float("inf"))


class ServedModel:
    """One model and the task that holds its processor."""

    def __init__(self, card: ModelCard, limits: AdmissionLimits) -> None:
        self.card = card
        self.present = True
        """its card is in the registry"""
        self.processor: Processor | None = None
        self.problem = ""
        """why there is no processor; empty while it is being built"""
        self.settled = asyncio.Event()
        """set when there is a processor or a problem"""
        self.retired = asyncio.Event()
        """another model has its name, or none"""
        self.removal: asyncio.TimerHandle | None = None
        self.admission = AdmissionControl(limits, self._capacity, self._estimate)
        self.long = asyncio.Lock()
        """held while a long text is tokenized for an answer and nothing else"""

    def replace(self, replaced: bool) -> None:
        """Whether another model has its name, and no worker is left here: what is not begun goes there."""
        if replaced:
            self.admission.redirect()
        if self.processor is not None:
            self.processor.core.replace(replaced)

    @property
    def live(self) -> int:
        return self.processor.workers.live if self.processor is not None else 0

    async def idle(self) -> None:
        await self.admission.idle()
        if self.processor is not None:
            await self.processor.core.idle()

    def _capacity(self) -> Capacity:
        """Where nobody serves it, those who wait need not wait to be told."""
        if self.processor is not None:
            return self.processor.workers.capacity
        return EVERYBODY if self.settled.is_set() else Capacity()

    def _estimate(self) -> RequestEstimate:
        return self.processor.core.estimate if self.processor is not None else RequestEstimate()


class ServedModels:
    """Follows the registry while it is entered. A card that is gone is no longer listed, but for
    `request_timeout` seconds requests for it are still taken and wait for a worker (which may just be
    restarting); then the model is unknown, once it is idle."""

    def __init__(self, view: View, around: ModelContext, expected: str, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._view = view
        self._around = around
        self._expected = expected
        """the model of our own configuration: before its first worker is there it is not unknown but
        starting"""
        self._models: dict[str, ServedModel] = {}
        self._retiring: set[ServedModel] = set()
        """their requests finish, and migrate, on workers of the same fingerprint"""
        self._mixed: dict[str, set[str]] = {}
        """models whose workers have loaded different things, and which"""
        self._tasks = Owner()
        self._building = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._tasks.start(self._warm_up(), "importing vLLM")
        self._tasks.forever(self._follow, "served models")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for served in self._models.values():
            if served.removal is not None:
                served.removal.cancel()
        await self._tasks.stop()

    # what the edge asks

    def listed(self) -> list[ModelCard]:
        """The models that are ready, in order of name: a request would be served now."""
        return [card for card in self.known() if self._models[card.name].live]

    def known(self) -> list[ModelCard]:
        """Those and the ones whose processors are being built, or whose workers are being connected: requests for them
        wait."""
        known = [model for model in self._models.values() if model.present and not model.problem]
        return sorted((model.card for model in known), key=lambda card: card.name)

    def find(self, name: str | None) -> ServedModel:
        """The model of this name, or the only one. Raises Refusal."""
        names = [card.name for card in self.known()]
        if name is None:
            if len(names) > 1:
                raise Refusal(400, f"model must be named; there are: {', '.join(names)}", "model")
            name = names[0] if names else self._expected
        served = self._models.get(name)
        if served is not None and not served.problem:
            return served
        if served is not None or name == self._expected:
            raise Refusal(503, f"{name} is not being served: {self.missing(name)}", retry_after=5.0)
        there = f"there are: {', '.join(names)}" if names else "there are none now"
        raise Refusal(404, f"the model {name!r} does not exist; {there}", "model")

    def missing(self, name: str | None = None) -> str:
        """What keeps this model (or any) from being served; empty where nothing does."""
        if name is None:
            if any(one.live for one in self._models.values()):
                return ""
            return "; ".join(f"{one}: {self.missing(one)}" for one in self._models or [self._expected])
        served = self._models.get(name)
        if served is None:
            return "no decode worker has registered"
        if served.processor is None:
            return served.problem or "its tokenizer and configuration are being loaded"
        return "" if served.live else "no decode worker is connected"

    async def settled(self) -> None:
        """Until each model that the registry has now is served, or known not to be."""
        self._take()
        for served in list(self._models.values()):
            await served.settled.wait()

    def load(self) -> int:
        """Requests that need a decode worker and are not over, of this frontend."""
        return sum(served.admission.requests for served in self._all())

    def report(self) -> Load:
        """What this frontend is at, for the registry."""
        served = [(model, model.processor) for model in self._all() if model.processor is not None]
        return Load(
            running=sum(processor.core.running for _, processor in served),
            waiting=sum(len(model.admission) for model, _ in served),
            unreachable=sorted(
                {worker for _, processor in served for worker in processor.workers.unreachable}
            ),
        )

    def live(self) -> dict[str, int]:
        """Connected decode workers by model."""
        return {name: served.live for name, served in sorted(self._models.items())}

    def degraded(self) -> dict[str, str]:
        """The processes that supervisors keep alive and that are not ready now, with what is known of them."""
        return {f"{slot.name}@{slot.host}": str(slot) for slot in self._view.slots() if not slot.ready}

    # following the registry

    async def _warm_up(self) -> None:
        """Before the first card comes: workers take longer to start than vLLM to be imported."""
        try:
            await _load()
        except ImportError:
            logger.exception("no model can be served: vLLM cannot be imported")

    async def _follow(self) -> None:
        async for _ in self._view.changes():
            self._take()

    def _take(self) -> None:
        cards = {name: _newest(cards) for name, cards in self._view.cards().items()}
        for name in self._models.keys() - cards.keys():
            self._miss(name)
        for name, card in cards.items():
            self._serve(name, card)
        for name, all_cards in self._view.cards().items():
            self._look_for_mixed(name, all_cards)
        for served in self._all():
            self._tell(served)
        for role in Role:
            INSTANCES.labels(role.value).set(len(self._view.instances(role)))

    def _all(self) -> list[ServedModel]:
        return [*self._models.values(), *self._retiring]

    def _look_for_mixed(self, name: str, cards: list[tuple[str, ModelCard]]) -> None:
        there, before = {card.fingerprint for _, card in cards}, self._mixed.get(name)
        if len(there) < 2:
            self._mixed.pop(name, None)
        elif there != before:
            self._mixed[name] = there
            newest = _newest(cards).fingerprint
            others = ", ".join(
                f"{instance} ({card.fingerprint})" for instance, card in cards if card.fingerprint != newest
            )
            logger.warning(
                "%s: its workers have loaded different weights or settings; new requests go only to those of %s, "
                "not to %s",
                name,
                newest,
                others,
            )

    def _serve(self, name: str, card: ModelCard) -> None:
        served = self._models.get(name)
        if served is not None and served.card.alike(card):
            served.present = True
            if served.removal is not None:
                served.removal.cancel()
                served.removal = None
            return
        if served is not None:
            logger.info("%s: its model card changed", name)
            self._remove(name)
        self._models[name] = served = ServedModel(card, self._limits)
        WAITING.labels(name).set_function(served.admission.__len__)
        holding = forever(lambda: self._hold(served), f"model: {name}", until_done=True)
        self._tasks.start(holding, f"model: {name}")

    def _miss(self, name: str) -> None:
        served = self._models[name]
        if served.present:
            served.present = False
            grace = self._around.request_timeout
            logger.warning("%s: no decode worker is left; requests wait for one for %g s", name, grace)
            served.removal = asyncio.get_running_loop().call_later(grace, self._remove, name)

    def _remove(self, name: str) -> None:
        served = self._models.pop(name)
        WAITING.remove(name)
        if served.removal is not None:
            served.removal.cancel()
        served.retired.set()
        self._retiring.add(served)

    def _tell(self, served: ServedModel) -> None:
        if served.processor is not None:
            self._tell_processor(served, served.processor)
        if served.retired.is_set():
            served.replace(served.card.name in self._models and not served.live)

    def _tell_processor(self, served: ServedModel, processor: "Processor") -> None:
        frontends = len(self._view.instances(Role.FRONTEND))
        workers = self._view.instances(Role.DECODE, served.card.name)
        ours = [worker for worker in workers if worker.fingerprint == served.card.fingerprint]
        processor.workers.update(ours, max(1, frontends))
        policy = self._view.settings().get("router", self._around.router)
        if policy in POLICIES:
            processor.workers.policy = policy
        served.admission.advance()

    # one model

    async def _hold(self, served: ServedModel) -> None:
        """Build its processor and keep it until the model is retired and idle."""
        name = served.card.name
        try:
            while not served.retired.is_set():
                try:
                    await self._hold_once(served)
                except (ConfigError, Unavailable) as error:
                    served.problem = str(error)
                except Exception as error:
                    logger.exception("%s: building its processor failed", name)
                    served.problem = f"internal error: {error}"
                if served.retired.is_set():
                    return
                logger.error("%s is not served: %s", name, served.problem)
                served.settled.set()
                served.admission.advance()
                with suppress(TimeoutError):
                    await asyncio.wait_for(served.retired.wait(), RETRY)
        finally:
            self._retiring.discard(served)
            if served.retired.is_set():  # perhaps while it was being built, which failed
                served.settled.set()
                served.admission.redirect()

    async def _hold_once(self, served: ServedModel) -> None:
        name = served.card.name
        async with AsyncExitStack() as stack:
            async with self._building:
                serving = (await _load()).serve_model(served.card, self._around)
                processor: Processor = await stack.enter_async_context(serving)
            processor.core.on_capacity = served.admission.advance
            try:
                served.processor, served.problem = processor, ""
                served.settled.set()
                self._tell(served)
                logger.info("%s is being served, up to %d tokens", name, served.card.max_model_len)
                await served.retired.wait()
                with suppress(TimeoutError):
                    await asyncio.wait_for(served.idle(), self._around.longest)
                logger.info("%s is no longer served", name)
            finally:
                served.processor = None
                served.admission.advance()


async def _load() -> ModuleType:
    """It imports vLLM: in a thread, so that the edge answers meanwhile."""
    return await asyncio.to_thread(_import)


@cache
def _import() -> ModuleType:
    """What it brings stays, so the garbage collector need not walk it again and again: 20-45 ms instead of 500 for a
    full collection. Models are not frozen: those that go would never be collected."""
    module = importlib.import_module("pdserve.frontend.model.processor")
    gc.collect()
    gc.freeze()
    return module


def _newest(cards: list[tuple[str, ModelCard]]) -> ModelCard:
    return max(
        (card for _, card in cards), key=lambda card: (card.generation, card.created, card.fingerprint)
    )
