"""The decode worker: generates tokens for frontends, with KV computed locally or by prefill workers.

The life of a request:

1. A frontend sends a `Submit` on its stream; `_handle` passes it to `RequestRunner` (`serving.py`).
2. `_decide` looks up the prefix hit, estimates both ways (`scheduling/prefill_times.py`) and chooses local or remote
   prefill (`policy/decision.py`).
3. Remote: `PromptPublisher` holds the prompt back in a fair queue until the prefill workers need one more
   (`remote/publisher.py`).
4. `RemotePrefill` publishes a `PrefillRequest` to NATS JetStream, or sends it to a worker that has the prefix, and
   waits with a timeout (`remote/client.py`).
5. A prefill worker begins it and answers `PrefillStarted`, then `PrefillDone` with a KV handle and the first token.
   `AnswerReader` gives these to the request, and rejects KV that comes too late (`remote/answer_reader.py`).
6. The handle is checked (`kv/handles.py`). If anything failed, the prompt is prefilled locally.
7. A suspect of an engine's death waits until all requests in the engine have a token (`scheduling/quarantine.py`).
8. `_report` sends `Placed` to the frontend, and the prefill worker's first token.
9. Local: the prompt waits for its turn, because chunks of prompts delay decoding
   (`scheduling/prefill_slots.py`).
10. `_generate` hands the request to the engine. With a handle, the engine reads the KV over NIXL (`kv/connector.py`);
    KV that cannot be read is recomputed.
11. Each engine step comes to `read_step`, which sends one `Outputs` per frontend (`replies.py`).
12. The first step ends the quarantine, teaches the estimator, and counts how the prompt got its KV.
13. The request ends with its last output, a cancellation, or a `Failed`, after which the frontend may migrate it.

The stages of the process are in `process/life.py`."""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from pdserve.contract.messages import Cancel, Failed, GetArchive, Hello, Load, Refused, Submit, ToDecode
from pdserve.contract.records import ModelCard, Role
from pdserve.contract.reports import LinkState
from pdserve.decode.live_updates import LiveSettings
from pdserve.decode.peers.links import KvLinks
from pdserve.decode.peers.prefill_prefixes import PrefillPrefixIndex
from pdserve.decode.peers.prefill_workers import PrefillWorkers
from pdserve.decode.policy.decision import queue_limit
from pdserve.decode.remote.answer_reader import AnswerReader
from pdserve.decode.remote.client import RemotePrefill
from pdserve.decode.remote.publisher import PromptPublisher
from pdserve.decode.remote.warm_up import WarmUp
from pdserve.decode.replies import INTERNAL, Frontends
from pdserve.decode.requests import DecodeRequests
from pdserve.decode.scheduling.prefill_slots import ChunkLimit, PromptSlots
from pdserve.decode.scheduling.prefill_times import Estimator
from pdserve.decode.scheduling.quarantine import Quarantine
from pdserve.decode.serving import RequestRunner
from pdserve.engine.base import Engine, Step
from pdserve.observe.metrics import BACKLOG, QUEUE_DEPTH, USABLE_WORKERS
from pdserve.process.presence import model_card
from pdserve.process.worker import EngineWorker
from pdserve.registry import keys
from pdserve.registry.view import RegistryView
from pdserve.runtime.tasks import Work, isolate_errors
from pdserve.stream.archives import ModelArchive
from pdserve.util.errors import EngineDead

logger = logging.getLogger(__name__)

GAP_STEP = 0.005
"""The reported gap is a multiple of this many seconds, so that an idle worker's decaying gap causes few messages."""


class DecodeWorker(EngineWorker):
    work = Role.DECODE
    follows = (*keys.instances(Role.PREFILL), keys.NEWCOMERS, keys.SETTINGS)
    without_nats = "prompts are prefilled locally"

    def _assemble(self, engine: Engine) -> None:
        config, queue = self._config, self._queue
        assert config.decode is not None
        assert self._stream is not None
        self.requests = DecodeRequests(self.tracer)
        self.settings = LiveSettings(config.decode)
        self._archive = ModelArchive(config.model)
        self._workers = PrefillWorkers(
            self.id, config.served_model_name, engine, queue, self.view, self.requests
        )
        self._links = KvLinks(self._workers, self.requests)
        self._prefixes = PrefillPrefixIndex(queue, self._workers, config.decode.prefill_by_prefix)
        self._publisher = PromptPublisher(queue, self._workers)
        self._remote = RemotePrefill(self.id, engine, queue, self._workers, self._links, self._publisher)
        self._answers = AnswerReader(
            self.id, engine, queue, self._workers, self.requests, self._publisher, self._prefixes
        )
        self._warm_up = WarmUp(engine, self.view, self._workers, self._remote, self.requests)
        quarantine = Quarantine()
        self._frontends = Frontends(engine, self._stream, self._workers, self.requests, quarantine)
        usual = int(str(config.decode.engine_args.get("long-prefill-token-threshold", 0)))
        estimator = Estimator(self.requests, queue, self._workers, usual=usual)
        estimator.block = lambda: engine.facts.block_size  # known once the engine has started
        self._runner = RequestRunner(
            engine,
            self._frontends,
            queue,
            self._workers,
            self._prefixes,
            self._remote,
            self._links,
            self.requests,
            self.settings,
            quarantine,
            estimator,
            PromptSlots(lambda: estimator.chunk, usual),
            ChunkLimit(engine, estimator),
            start=self.start_task,
        )

    # life cycle

    async def card(self) -> ModelCard | None:
        await self._archive.make()
        name = self._config.served_model_name
        async with RegistryView(self._registry, keys.card(name, "")) as view:
            others = [card for _, card in view.cards().get(name, [])]
        return model_card(self._config, self._engine.facts, self._archive.name, others)

    def permanent(self) -> Mapping[str, Work]:
        warm_ups = {"warm-ups with prefill workers": self._warm_up.run}
        return {
            **super().permanent(),
            "messages of frontends": self._read_frontends,
            "deadlines": self._frontends.watch_deadlines,
            "load": partial(self._frontends.report_load, self.load),
            "preemption": partial(self._frontends.preempt, self.load),
            "prefixes": self._frontends.report_prefixes,
            "prefill answers": self._answers.read,
            "registry changes": self._follow_registry,
            "prefill workers": self._workers.watch,
            "prefixes of prefill workers": self._prefixes.read,
            "held prompts": self._publisher.watch,
            **(warm_ups if self.settings.current.remote_prefill else {}),
        }

    async def warm_up(self) -> None:
        if self.settings.current.remote_prefill:
            usable = USABLE_WORKERS.labels(self._config.served_model_name, Role.PREFILL)
            usable.set_function(lambda: len(self._workers.available()))
            await self._presence.warm_up(self.view, self._warm_up.tried)

    async def drain(self) -> None:
        for request in self.requests:
            if request.warm_up_with:
                await self._frontends.cancel(request)
        logger.info("draining: %d requests to finish", len(self.requests))
        await self._presence.drain()
        try:
            await asyncio.wait_for(self.requests.empty(), self._config.drain_timeout)
        except TimeoutError:
            logger.warning("%d requests did not finish within the drain timeout", len(self.requests))
        for request in self.requests:
            await self._frontends.end(request, f"{self.id} is shutting down", retry=True)

    async def engine_died(self, death: EngineDead) -> None:
        await self._frontends.engine_died(death)

    def load(self) -> Load:
        usage, depth = self._engine.usage, self._queue.depth
        QUEUE_DEPTH.labels(self._config.served_model_name).set(depth)
        outlook = self._runner.estimator.outlook()
        BACKLOG.labels(self._config.served_model_name, Role.PREFILL).set(outlook.backlog)
        return Load(
            usage.running,
            usage.waiting + self.requests.waiting,
            round(usage.kv_usage, 6),
            self.requests.tokens,
            depth,
            queue_limit(self.settings.current),
            self.requests.remote,
            backlog=round(outlook.backlog, 3),
            prompt_wait=round(outlook.wait, 3),
            token_seconds=float(f"{outlook.token:.2g}"),
            gap_seconds=round(outlook.gap / GAP_STEP) * GAP_STEP,
        )

    def links(self) -> list[LinkState]:
        return self._links.states() if self.settings.current.remote_prefill else []

    # from the engine, the frontends and the registry

    async def _read_step(self, step: Step) -> None:
        await self._runner.read_step(step)

    async def _read_frontends(self) -> None:
        assert self._stream is not None
        async for frontend, message in self._stream.received():
            with isolate_errors("messages of frontends") as one:
                await self._handle(frontend, message)
            if one.error is not None and isinstance(message, Submit):
                await self._frontends.send(frontend, Failed(message.request_id, INTERNAL, retry=True))

    async def _handle(self, frontend: str, message: ToDecode | None) -> None:
        match message:
            case Submit(request_id) if self.draining:
                failed = Failed(request_id, f"{self.id} is draining", retry=True)
                await self._frontends.send(frontend, failed)
            case Submit():
                await self._runner.submit(frontend, message)
            case Cancel(request_ids):
                for request_id in request_ids:
                    request = self.requests.get(request_id)
                    if request is not None and request.frontend == frontend:
                        await self._frontends.cancel(request)
            case Hello():
                await self._hello(frontend, message)
            case GetArchive():
                self.start_task(self._archive.send(partial(self._frontends.send, frontend)))
            case None:
                await self._frontends.forget(frontend)

    async def _hello(self, frontend: str, hello: Hello) -> None:
        ours, given = self._engine.facts.vllm_version, hello.vllm_version
        if given != ours:
            await self._frontends.send(frontend, Refused(f"{self.id} runs vLLM {ours}, the frontend {given}"))
        elif self.draining:
            await self._frontends.send(frontend, Refused(f"{self.id} is draining"))
        else:
            await self._frontends.welcome(frontend, hello, self.load())

    async def _follow_registry(self) -> None:
        async for _ in self.view.changes():
            with isolate_errors("live settings"):
                self.settings.read(self.view.settings())
            self._workers.give_up_gone()
            self._links.forget_gone()
            self._prefixes.forget_gone()
