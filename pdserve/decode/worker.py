"""The decode worker: what it is made of, and its life from the first announcement to the drain."""

import asyncio
import logging
from contextlib import AsyncExitStack

from pdserve import queue, registry, stream
from pdserve.config.schema import Config
from pdserve.decode.archive import Archive
from pdserve.decode.remote import RemotePrefill
from pdserve.decode.requests import Requests
from pdserve.decode.serving import Serving
from pdserve.decode.settings import LiveSettings
from pdserve.decode.warm_up import WarmUp
from pdserve.engine.base import Engine
from pdserve.messages import Cancel, Failed, Hello, Load, Refused, Role, Submit, ToDecode
from pdserve.observe.metrics import QUEUE_DEPTH, serve_metrics
from pdserve.plan.slots import Slot
from pdserve.process.identity import describe, model_card, new_instance_id
from pdserve.process.lifecycle import Lifecycle
from pdserve.process.liveness import watch_engine
from pdserve.process.measured import log_memory
from pdserve.process.presence import Presence
from pdserve.process.run import build_engine, run_until_signalled
from pdserve.process.self_test import self_test
from pdserve.queue.base import BlobStore, PrefillQueue
from pdserve.registry.base import Registry
from pdserve.registry.view import RegistryView
from pdserve.stream.base import StreamServer
from pdserve.tasks import forever

log = logging.getLogger(__name__)


class DecodeWorker:
    """`run` is its whole life. The seams are entered by it, in the order in which they need each other, and
    left in the opposite one; `stop` asks it to drain and return."""

    def __init__(
        self,
        config: Config,
        slot: Slot,
        instance_id: str,
        engine: Engine,
        registry: Registry,
        queue: PrefillQueue,
        stream: StreamServer,
        metrics_url: str = "",
        blobs: BlobStore | None = None,
    ) -> None:
        assert config.decode is not None
        self.id = instance_id
        self.requests = Requests()
        self.settings = LiveSettings(config.decode)
        self.view = RegistryView(registry)
        self._config = config
        self._slot = slot
        self._engine = engine
        self._registry = registry
        self._queue = queue
        self._stream = stream
        self._metrics_url = metrics_url
        self._archive = Archive(config.model, blobs)
        self._life = Lifecycle()
        self._remote = RemotePrefill(
            instance_id, config.served_model_name, engine, queue, self.view, self.requests
        )
        self._warm_up = WarmUp(engine, self.view, self._remote, self.requests)
        self._serving = Serving(engine, stream, queue, self._remote, self.requests, self.settings, self._life)

    def stop(self) -> None:
        self._life.stop()

    @property
    def ready(self) -> asyncio.Event:
        """Set while it serves."""
        return self._life.ready

    async def run(self) -> None:
        """Returns after `stop` and the drain; raises EngineDead when the engine is gone."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._engine)
            self._queue.bind(self._engine.facts.fingerprint)
            for seam in (self._stream, self._queue, self._registry, self.view):
                await stack.enter_async_context(seam)
            log_memory(self._config, self._slot, self._engine.facts)
            await self_test(self._engine, Role.DECODE)
            self._presence = await self._make_presence()
            await self._life.run(
                self._announce,
                [
                    self._read_frontends(),
                    self._serving.read_engine(),
                    self._serving.watch_deadlines(),
                    forever(self._remote.read_answers, "prefill answers"),
                    forever(self._follow_registry, "registry changes"),
                    *([self._warm_up.run()] if self.settings.current.remote_prefill else []),
                    forever(self._presence.keep_current, "load report"),
                    watch_engine(self._engine),
                    forever(self._archive.keep_stored, "model archive"),
                ],
                self._drain,
                self._serving.engine_died,
            )

    async def _make_presence(self) -> Presence:
        await self._archive.make()
        facts = self._engine.facts
        instance = describe(self._config, self._slot, self.id, facts, self._stream.address, self._metrics_url)
        others = [card for _, card in self.view.cards().get(self._config.served_model_name, [])]
        card = model_card(self._config, facts, self._archive.name, others)
        return Presence(self._registry, instance, card, self._load, lambda: self._queue.clock_skew)

    async def _announce(self) -> None:
        if self.settings.current.remote_prefill:
            await self._presence.warm_up(self.view, self._warm_up.tried)
        await self._presence.announce()

    def _load(self) -> Load:
        usage = self._engine.usage
        depth = self._queue.depth
        QUEUE_DEPTH.set(depth)
        waiting = usage.waiting + self.requests.waiting
        return Load(usage.running, waiting, round(usage.kv_usage, 6), depth)

    async def _read_frontends(self) -> None:
        async for frontend, message in self._stream.received():
            await self._handle(frontend, message)

    async def _handle(self, frontend: str, message: ToDecode | None) -> None:
        match message:
            case Submit(request_id) if self._life.draining:
                failed = Failed(request_id, f"{self.id} is draining", retry=True)
                await self._serving.send(frontend, failed)
            case Submit():
                await self._serving.submit(frontend, message)
            case Cancel(request_ids):
                for request_id in request_ids:
                    request = self.requests.get(request_id)
                    if request is not None and request.frontend == frontend:
                        await self._serving.cancel(request)
            case Hello(version):
                await self._hello(frontend, version)
            case None:
                await self._serving.forget(frontend)

    async def _hello(self, frontend: str, version: str) -> None:
        ours = self._engine.facts.vllm_version
        if version != ours:
            refused = Refused(f"{self.id} runs vLLM {ours}, the frontend {version}")
            await self._serving.send(frontend, refused)
        elif self._life.draining:
            await self._serving.send(frontend, Refused(f"{self.id} is draining"))

    async def _follow_registry(self) -> None:
        async for _ in self.view.changes():
            self.settings.read(self.view.settings())
            self._remote.give_up_on_the_gone()

    async def _drain(self) -> None:
        for warm_up in self.requests.of(""):
            await self._serving.cancel(warm_up)
        log.info("draining: %d requests to finish", len(self.requests))
        await self._presence.drain()
        try:
            await asyncio.wait_for(self.requests.empty(), self._config.drain_timeout)
        except TimeoutError:
            log.warning("%d requests did not finish within the drain timeout", len(self.requests))
        for request in self.requests:
            await self._serving.end(request, f"{self.id} is shutting down", retry=True)


async def main(config: Config, slot: Slot) -> None:
    """The process. Returns after SIGTERM and the drain; raises EngineDead."""
    assert config.etcd is not None
    assert config.nats is not None
    instance_id = new_instance_id(slot)
    with serve_metrics(config.host) as url:
        worker = DecodeWorker(
            config,
            slot,
            instance_id,
            build_engine(config, slot, instance_id),
            registry.connect(config.etcd, config.namespace, patient=True),
            queue.connect(config.nats, config.namespace, config.served_model_name),
            stream.listen(config.host),
            url,
            queue.connect_blobs(config.nats, config.namespace),
        )
        await run_until_signalled(worker, config.drain_timeout)
