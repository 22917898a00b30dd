"""The decode worker: requests in from frontends, prefill here or elsewhere, tokens out, one message per
engine step."""

import asyncio
import logging
import time
from collections import defaultdict
from contextlib import AsyncExitStack

from pdserve import queue, registry, stream
from pdserve.config.schema import Config, Slot
from pdserve.decode.policy import Decision, decide
from pdserve.decode.remote import CANCELLED, RemotePrefill
from pdserve.decode.requests import Phase, Request, Requests
from pdserve.decode.settings import LiveSettings
from pdserve.engine.base import Engine, Output, Transfers
from pdserve.errors import EngineDead, PeerGone, ProtocolError
from pdserve.messages import (
    Cancel,
    Failed,
    Hello,
    KvHandle,
    Load,
    Outputs,
    Placed,
    Refused,
    Submit,
    ToDecode,
    ToFrontend,
)
from pdserve.observe.metrics import KV_TRANSFER_BYTES, KV_TRANSFER_SECONDS, PREFILL, QUEUE_DEPTH
from pdserve.observe.page import serve_metrics
from pdserve.queue.base import PrefillQueue
from pdserve.registry.base import Registry
from pdserve.registry.view import View
from pdserve.stream.base import StreamServer
from pdserve.worker.identity import describe, model_card, new_instance_id
from pdserve.worker.lifecycle import Lifecycle
from pdserve.worker.presence import Presence
from pdserve.worker.run import build_engine, run_until_signalled

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
    ) -> None:
        assert config.decode is not None
        self.id = instance_id
        self._config = config
        self._slot = slot
        self._engine = engine
        self._registry = registry
        self._queue = queue
        self._stream = stream
        self._metrics_url = metrics_url
        self._requests = Requests()
        self._settings = LiveSettings(config.decode)
        self._life = Lifecycle()

    def stop(self) -> None:
        self._life.stop()

    @property
    def ready(self) -> asyncio.Event:
        """Set while it serves."""
        return self._life.ready

    async def run(self) -> None:
        """Returns after `stop` and the drain; raises EngineDead when the engine is gone."""
        async with AsyncExitStack() as stack:
            for seam in (self._engine, self._stream, self._queue, self._registry):
                await stack.enter_async_context(seam)
            self._view = await stack.enter_async_context(View(self._registry))
            self._remote = RemotePrefill(self.id, self._engine, self._queue, self._view, self._requests)
            self._presence = self._make_presence()
            await self._life.run(
                self._presence.announce,
                [
                    self._read_frontends(),
                    self._read_engine(),
                    self._remote.read_answers(),
                    self._follow_registry(),
                    self._watch_deadlines(),
                    self._presence.keep_current(),
                ],
                self._drain,
            )

    def _make_presence(self) -> Presence:
        instance = describe(
            self._config, self._slot, self.id, self._engine.facts, self._stream.address, self._metrics_url
        )
        return Presence(self._registry, instance, model_card(self._config, self._engine.facts), self._load)

    def _load(self) -> Load:
        usage = self._engine.usage
        waiting = max(usage.waiting, 0) + self._requests.waiting
        depth = self._queue.depth
        QUEUE_DEPTH.set(depth)
        return Load(usage.running, waiting, round(usage.kv_usage, 3), depth)

    # from frontends

    async def _read_frontends(self) -> None:
        async for frontend, message in self._stream.received():
            await self._handle(frontend, message)

    async def _handle(self, frontend: str, message: ToDecode | None) -> None:
        match message:
            case Submit():
                await self._submit(frontend, message)
            case Cancel(request_ids):
                for request_id in request_ids:
                    request = self._requests.get(request_id)
                    if request is not None and request.frontend == frontend:
                        await self._cancel(request)
            case Hello(version):
                await self._hello(frontend, version)
            case None:
                await self._forget(frontend)

    async def _hello(self, frontend: str, version: str) -> None:
        ours = self._engine.facts.vllm_version
        if version != ours:
            await self._send(frontend, Refused(f"{self.id} runs vLLM {ours}, the frontend {version}"))
        elif self._life.draining:
            await self._send(frontend, Refused(f"{self.id} is draining"))

    async def _submit(self, frontend: str, submit: Submit) -> None:
        if self._life.draining:
            await self._send(frontend, Failed(submit.request_id, f"{self.id} is draining", retry=True))
            return
        request = self._requests.add(frontend, submit)
        if request is None:
            await self._send(frontend, Failed(submit.request_id, "this request id was used before"))
            return
        self._life.start(self._serve(request), name=f"request {request.id}")

    async def _forget(self, frontend: str) -> None:
        gone = self._requests.of(frontend)
        if gone:
            log.warning("frontend %s is gone: cancelling its %d requests", frontend, len(gone))
        for request in gone:
            await self._cancel(request)

    async def _cancel(self, request: Request) -> None:
        """While the request is not in the engine yet, `_serve` sees `cancelled` and drops it."""
        request.cancelled = True
        if request.phase is Phase.RUNNING:
            self._requests.drop(request)
            await self._engine.cancel([request.id])
        else:
            request.resolve(CANCELLED)

    # one request

    async def _serve(self, request: Request) -> None:
        try:
            await self._place(request)
        except EngineDead:
            raise
        except ProtocolError as error:
            log.warning("request %s refused: %s", request.id, error)
            await self._fail(request, str(error), retry=False)
        except Exception:
            log.exception("request %s failed before it reached the engine", request.id)
            await self._fail(request, "internal error in the decode worker", retry=True)

    async def _place(self, request: Request) -> None:
        if time.time() >= request.submit.deadline:
            await self._fail(request, "the deadline passed before the request was started", retry=False)
            return
        decision = self._decide(request)
        handle = None
        if decision.mode == "remote":
            handle = await self._remote.handle(request)
            if handle is None:
                decision = Decision("local", "fallback")
        if not request.cancelled:
            PREFILL.labels(decision.mode, decision.reason).inc()
            await self._send(request.frontend, Placed(request.id, decision.mode, decision.reason))
        if not request.cancelled:
            await self._generate(request, handle)
        elif handle is not None:
            await self._engine.reject(handle)
        if request.cancelled:
            self._requests.drop(request)

    def _decide(self, request: Request) -> Decision:
        submit = request.submit
        prompt, depth = len(submit.prompt), self._queue.depth
        settings = self._settings.current
        hit = self._engine.prefix_hit(submit.prompt, submit.body) if settings.remote_prefill else 0
        workers = len(self._remote.workers())
        supported = self._engine.remote_ok(submit.body)
        decision = decide(prompt, hit, depth, workers, self._queue.connected, settings, supported=supported)
        log.info(
            "request %s: prefill %s (%s), prompt %d, hit %d, to compute %d of %d, queue %d of %d, workers %d",
            request.id,
            decision.mode,
            decision.reason,
            prompt,
            hit,
            prompt - hit,
            settings.max_local_prefill_length,
            depth,
            settings.max_prefill_queue_size,
            workers,
        )
        return decision

    async def _generate(self, request: Request, handle: KvHandle | None) -> None:
        """RUNNING before the engine is asked: a cancel that comes during the call reaches the engine after
        it."""
        request.phase = Phase.RUNNING
        submit = request.submit
        try:
            await self._engine.generate(request.id, submit.prompt, submit.body, handle)
        except ProtocolError:
            if handle is not None:
                await self._engine.reject(handle)
            raise
        if request.cancelled:
            await self._engine.cancel([request.id])

    async def _fail(self, request: Request, message: str, *, retry: bool) -> None:
        self._requests.drop(request)
        if not request.cancelled:
            await self._send(request.frontend, Failed(request.id, message, retry))

    # from the engine

    async def _read_engine(self) -> None:
        while True:
            step = await self._engine.step()
            if step.transfers is not None:
                _count(step.transfers)
            by_frontend: defaultdict[str, list[Output]] = defaultdict(list)
            for output in step.outputs:
                request = self._requests.get(output.request_id)
                if request is None:
                    continue  # cancelled
                if output.failed:
                    await self._fail(request, "the engine failed this request", retry=True)
                    continue
                by_frontend[request.frontend].append(output)
                if output.finished:
                    self._requests.drop(request)
            for frontend, outputs in by_frontend.items():
                await self._send(frontend, Outputs(self._engine.pack(outputs)))

    async def _send(self, frontend: str, message: ToFrontend) -> None:
        try:
            await self._stream.send(frontend, message)
        except PeerGone:
            await self._forget(frontend)

    # from the registry and the clock

    async def _follow_registry(self) -> None:
        async for _ in self._view.changes():
            self._settings.read(self._view.settings())
            self._remote.give_up_if_alone()

    async def _watch_deadlines(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for request in self._requests:
                if time.time() >= request.submit.deadline:
                    await self._expire(request)

    async def _expire(self, request: Request) -> None:
        await self._send(request.frontend, Failed(request.id, "the request's deadline passed"))
        await self._cancel(request)

    async def _drain(self) -> None:
        log.info("draining: %d requests to finish", len(self._requests))
        await self._presence.drain()
        try:
            await asyncio.wait_for(self._requests.empty(), self._config.drain_timeout)
        except TimeoutError:
            log.warning("%d requests did not finish within the drain timeout", len(self._requests))
        for request in self._requests:
            failed = Failed(request.id, f"{self.id} is shutting down", retry=True)
            await self._send(request.frontend, failed)
            await self._cancel(request)


def _count(transfers: Transfers) -> None:
    KV_TRANSFER_BYTES.inc(transfers.bytes)
    for seconds in transfers.seconds:
        KV_TRANSFER_SECONDS.observe(seconds)


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
            registry.connect(config.etcd, config.namespace),
            queue.connect(config.nats, config.namespace, config.served_model_name),
            stream.listen(config.host),
            url,
        )
        await run_until_signalled(worker)
