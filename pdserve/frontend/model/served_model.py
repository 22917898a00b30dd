"""One served model: its model card, its processor, and its admission control."""

import asyncio
import sys
from functools import partial
from typing import TYPE_CHECKING

from pdserve.config.schema import AdmissionLimits
from pdserve.contract.records import Adapter, ModelCard, Role
from pdserve.contract.reports import LinkState
from pdserve.contract.slo import NO_SLO
from pdserve.frontend.admission.capacity import Capacity
from pdserve.frontend.admission.control import AdmissionControl
from pdserve.frontend.admission.granted import ModelReplaced
from pdserve.frontend.admission.wait_estimate import RequestEstimate
from pdserve.frontend.edge.request_state import RETRY_AFTER
from pdserve.frontend.edge.response import HttpError
from pdserve.observe.metrics import BACKLOG, LINKS, RUNNING, USABLE_WORKERS, WAITING

if TYPE_CHECKING:
    from pdserve.frontend.model.processor import Processor

_LINK_STATES = ("up", "down")
UNKNOWN_SECONDS = 1.0
"""Assumed seconds per request until one has finished."""
UNLIMITED = Capacity(sys.maxsize, sys.maxsize, float("inf"))


class ServedModel:
    def __init__(self, card: ModelCard, limits: AdmissionLimits) -> None:
        self.card = card
        self.processor: Processor | None = None
        self.problem = ""
        """why its processor could not be built; else empty"""
        self.refused = False
        """the problem is its configuration, so that building again would not help"""
        self.settled = asyncio.Event()
        """set once there is a processor or a problem, or the model is retired"""
        self.retired = asyncio.Event()
        """set once the model is removed, or another model has its name"""
        self.removal: asyncio.TimerHandle | None = None
        """timer that removes the model; set while its card is not in the registry"""
        self.leaves_zero = False
        """whether `hide` leaves the metric of usable workers at 0, for alerts"""
        self.promised = NO_SLO
        self.adapters: dict[str, Adapter] = {}
        """adapters that requests may name, by name"""
        self.slots_per_worker = 1
        """slots of the largest decode worker; without workers, the last known value"""
        self.admission = AdmissionControl(limits, self._capacity, self._estimate)

    async def ready(self) -> "Processor":
        """Wait for the processor. Raises ModelReplaced, and HttpError if it cannot be built."""
        await self.settled.wait()
        if self.processor is not None:
            return self.processor
        if self.retired.is_set():
            raise ModelReplaced
        message = f"{self.card.name} is not being served: {self.problem}"
        raise HttpError(503, message, retry_after=RETRY_AFTER)

    def retire(self) -> None:
        """Send the requests that wait for the processor on to the model that now has this name."""
        self.retired.set()
        self.settled.set()
        self.admission.redirect()

    def replace(self, replaced: bool) -> None:
        """Set whether another model has this name and no worker of this one is left. If so, requests without a token
        are redirected to the other model."""
        if replaced:
            self.admission.redirect()
        if self.processor is not None:
            self.processor.core.replace(replaced)

    @property
    def usable_workers(self) -> int:
        """Number of workers that accept requests now."""
        return self.processor.workers.usable if self.processor is not None else 0

    @property
    def waiting(self) -> int:
        """Number of requests in the admission queue plus admitted sequences for which there is no worker."""
        lost = len(self.processor.core.waiting) if self.processor is not None else 0
        return lost + len(self.admission)

    @property
    def backlog(self) -> float:
        """Seconds that one worker, with all its slots, would need for the waiting requests."""
        return self.waiting * (self._estimate().seconds(None) or UNKNOWN_SECONDS) / self.slots_per_worker

    @property
    def running(self) -> int:
        """Number of sequences at workers."""
        return self.processor.core.running if self.processor is not None else 0

    def _count_links(self, up: bool) -> int:
        return sum(link.up == up for link in self.links())

    @property
    def is_loading(self) -> bool:
        """Whether this frontend loads the model's tokenizer and configuration for the first time."""
        return bool(self.card.model) and not self.settled.is_set()  # a placeholder names no model

    def _count_decode_workers(self) -> float:
        """NaN while the model is being loaded: then no worker can be used, though decode workers may be there."""
        if self.is_loading:
            return float("nan")
        return self.processor.workers.usable_decode_workers if self.processor is not None else 0

    def links(self) -> list[LinkState]:
        return self.processor.workers.links() if self.processor is not None else []

    def show(self) -> None:
        """Export the model's gauges until `hide`."""
        name = self.card.name
        WAITING.labels(name).set_function(self.admission.__len__)
        RUNNING.labels(name).set_function(lambda: self.running)
        BACKLOG.labels(name, Role.DECODE).set_function(lambda: self.backlog)
        USABLE_WORKERS.labels(name, Role.DECODE).set_function(self._count_decode_workers)
        for state in _LINK_STATES:
            LINKS.labels(name, state).set_function(partial(self._count_links, state == "up"))

    def hide(self) -> None:
        name = self.card.name
        WAITING.remove(name)
        RUNNING.remove(name)
        BACKLOG.remove(name, Role.DECODE)
        USABLE_WORKERS.remove(name, Role.DECODE)
        if self.leaves_zero:
            USABLE_WORKERS.labels(name, Role.DECODE).set(0)
        for state in _LINK_STATES:
            LINKS.remove(name, state)

    async def idle(self) -> None:
        """Wait until no request is left."""
        await self.admission.idle()
        if self.processor is not None:
            await self.processor.core.idle()

    def _capacity(self) -> Capacity:
        if self.processor is not None:
            return self.processor.workers.capacity
        # unlimited, because `ready` refuses requests at once
        return UNLIMITED if self.settled.is_set() else Capacity()

    def _estimate(self) -> RequestEstimate:
        return self.processor.core.estimate if self.processor is not None else RequestEstimate()
