"""One model, as the frontend serves it: vLLM's app and renderer on a remote engine core."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Self

from starlette.types import ASGIApp

from pdserve.errors import ConfigError
from pdserve.frontend.admission.capacity import Capacity
from pdserve.frontend.admission.estimate import RequestEstimate
from pdserve.frontend.model.assets import model_folder
from pdserve.frontend.model.card_args import frontend_argv
from pdserve.frontend.model.core import RemoteCore
from pdserve.frontend.model.model_metrics import MODEL_METRICS
from pdserve.frontend.model.surroundings import Surroundings
from pdserve.frontend.model.vllm_api import (
    VERSION,
    AsyncLLM,
    fail_request,
    make_app,
    make_engine,
    parse_args,
    restart_output_handler,
)
from pdserve.frontend.model.workers import Fleet
from pdserve.frontend.trace import RequestTrace
from pdserve.messages import Instance, ModelCard

logger = logging.getLogger(__name__)


class Processor:
    """Entering builds it, which takes a second or two, most of it in a thread. Raises ConfigError or
    Unavailable with the reason why this host cannot serve the card."""

    app: ASGIApp

    def __init__(self, card: ModelCard, around: Surroundings) -> None:
        self.card = card
        self._around = around
        self._core = RemoteCore(card.name, card.supported_tasks, card.max_model_len, around.request_timeout)
        self._fleet = Fleet(around.router, VERSION, around.connect, self._core)
        self._core.router = self._fleet
        self._closing = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self.card.vllm_version != VERSION:
            theirs = self.card.vllm_version or "an unknown version"
            raise ConfigError(
                [f"its workers run vLLM {theirs}, this frontend {VERSION}: install the same on both."]
            )
        async with AsyncExitStack() as stack:
            await self._build(stack)
            self._closing = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._closing.__aexit__(kind, error, trace)

    async def _build(self, stack: AsyncExitStack) -> None:
        registry = stack.enter_context(MODEL_METRICS.model())
        folder = await model_folder(self.card, self._around.blobs, self._around.state_dir)
        try:
            args = await asyncio.to_thread(parse_args, frontend_argv(self.card, folder))
            engine = await asyncio.to_thread(make_engine, args, self._core, registry)
        except (ValueError, OSError) as error:
            raise ConfigError([f"vLLM refuses its configuration: {error}"]) from error
        await stack.enter_async_context(self._fleet)
        stack.callback(self._stop, engine)  # before the fleet is left: its requests must not go on elsewhere
        self._core.fail_request = partial(fail_request, engine)
        self.app = await make_app(engine, args, self.card.supported_tasks)
        self._engine = engine
        self._watch_handler()

    def update(self, instances: Iterable[Instance], frontends: int) -> None:
        """This model's decode workers and how many frontends share them, as the registry has them now."""
        self._fleet.frontends = frontends
        self._fleet.update(instances)

    def route_by(self, policy: str) -> None:
        self._fleet.policy = policy

    def replace(self, replaced: bool) -> None:
        """Whether another model has this one's name, and no worker is left here."""
        self._core.replace(replaced)

    async def idle(self) -> None:
        """Until nothing is in flight."""
        await self._core.idle()

    @property
    def live(self) -> int:
        """Decode workers that would take a request now."""
        return self._fleet.live

    @property
    def running(self) -> int:
        """Sequences that a decode worker has."""
        return self._core.running

    @property
    def unreachable(self) -> list[str]:
        """Decode workers that are registered and that there is no connection to."""
        return self._fleet.unreachable

    @property
    def capacity(self) -> Capacity:
        """For further requests, at all of its workers."""
        return self._fleet.capacity

    @property
    def estimate(self) -> RequestEstimate:
        return self._core.estimate

    def pause(self, trace: RequestTrace) -> None:
        """Until `resume`, its sequences hold no places."""
        self._core.pause(trace)

    def resume(self, trace: RequestTrace) -> None:
        self._core.resume(trace)

    def on_capacity(self, tell: Callable[[], None]) -> None:
        """`tell` is called whenever there may be more capacity than before."""
        self._core.on_capacity = tell

    def _watch_handler(self) -> None:
        restart_output_handler(self._engine)
        self._engine.output_handler.add_done_callback(self._handler_ended)

    def _handler_ended(self, handler: "asyncio.Task[None]") -> None:
        """vLLM ends it when an output makes it raise, after failing every request: go on with the next
        ones."""
        if not handler.cancelled() and not self._core.resources.engine_dead:
            logger.error("%s: an output could not be processed; its requests failed", self.card.name)
            self._watch_handler()

    def _stop(self, engine: AsyncLLM) -> None:
        self._core.shutdown()
        engine.shutdown()
