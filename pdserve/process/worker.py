"""The base of decode and prefill workers: an engine, the queue, the registry, and their start."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import ClassVar, Self

import msgspec

from pdserve import queue, registry
from pdserve.config.schema import Config
from pdserve.contract.messages import Load
from pdserve.contract.records import ModelCard, Role
from pdserve.contract.reports import LinkState, ProcessReport
from pdserve.engine.base import Engine, Step
from pdserve.engine.spec import EngineNode, EngineSpec, make_engine
from pdserve.observe.metrics import ENGINE_REQUESTS, ENGINE_STALLED, KV_USAGE
from pdserve.plan.slots import Slot, disk_folder, worker_config
from pdserve.process.engine_checks import EngineWatch, log_memory, self_test
from pdserve.process.gpu_turns import gpu_turns
from pdserve.process.life import Service
from pdserve.process.nodes import Leader, meeting_place, node_leader, start_with_hosts
from pdserve.process.presence import Presence, new_instance_id, worker_instance
from pdserve.process.worker_adapters import WorkerAdapters
from pdserve.queue.base import PrefillQueue
from pdserve.registry.base import Registry
from pdserve.registry.view import RegistryView
from pdserve.runtime.tasks import Lifetime, Work
from pdserve.security.credentials import Credentials
from pdserve.stream.tcp import TcpStreamServer
from pdserve.util.errors import EngineDead, error_text
from pdserve.util.net import free_port


class EngineWorker(Service):
    follows: Sequence[str]
    """Prefixes of the registry keys that this role reads."""
    work: ClassVar[Role]
    """The role whose work this worker does, permanently or as a stand-in."""
    without_nats: str
    """Effect of a NATS outage on this role, for the log."""

    def __init__(
        self,
        config: Config,
        slot: Slot,
        instance_id: str,
        engine: Engine,
        registry: Registry,
        queue: PrefillQueue,
        stream: TcpStreamServer | None = None,
        metrics_url: str = "",
        leader: Leader | None = None,
    ) -> None:
        """`stream`: the frontends' connections, for workers that decode. `leader`: for workers that span hosts."""
        super().__init__(config, slot, instance_id, metrics_url)
        self.view = RegistryView(registry, *self.follows)
        self._engine = engine
        self._registry = registry
        self._queue = queue
        self._stream = stream
        self._leader = leader
        self._engine_watch = EngineWatch(engine, slot.gpus)
        self.depends_on("NATS", config.nats, lambda: queue.connected)
        self.depends_on("etcd", config.etcd, lambda: registry.connected)
        self._assemble(engine)

    @classmethod
    def connect(cls, config: Config, slot: Slot, metrics_url: str) -> Self:
        assert config.etcd is not None
        assert config.nats is not None
        credentials = Credentials.load(config.security.credentials)
        instance_id, decodes = new_instance_id(slot), cls.work.includes(Role.DECODE)
        section, node, leader = worker_config(config, slot), None, None
        connected = registry.connect(config.etcd, config.namespace, credentials, patient=True)
        if section.nodes > 1:
            node = EngineNode(0, config.host, free_port(config.host))
            leader = Leader(connected, meeting_place(slot), node_leader(config, section, node, instance_id))
        return cls(
            config,
            slot,
            instance_id,
            make_engine(section.engine, engine_spec(config, slot, instance_id, credentials, node)),
            connected,
            queue.connect(
                config.nats,
                config.namespace,
                config.served_model_name,
                credentials,
                cls.without_nats,
                config.queue_replicas,
            ),
            TcpStreamServer(config.host, credentials, port=slot.stream_port) if decodes else None,
            metrics_url,
            leader,
        )

    @abstractmethod
    def _assemble(self, engine: Engine) -> None:
        """Make the parts of this role. Called at the end of `__init__`."""

    async def start(self, stack: AsyncExitStack) -> None:
        """Enter engine, stream, queue and registry in the order in which they need each other."""
        connections: list[Lifetime] = [self._queue, self._registry, self.view]
        if self._leader is None:
            async with gpu_turns(self._slot.gpus, self._config.state_dir):
                await stack.enter_async_context(self._engine)
        else:
            connections.remove(self._registry)
            await stack.enter_async_context(self._registry)
            await stack.enter_async_context(self._leader)
            await start_with_hosts(stack.enter_async_context(self._engine), self._leader)
        facts = self._engine.facts
        self._show_usage()
        self._queue.bind(facts.fingerprint)
        if self._stream is not None:
            await stack.enter_async_context(self._stream)
        for connection in connections:
            await stack.enter_async_context(connection)
        log_memory(self._config, self._slot, facts)
        await self_test(self._engine)
        address = self._stream.address if self._stream is not None else ""
        section = worker_config(self._config, self._slot)
        self._adapters = WorkerAdapters(
            self._engine, section.engine_args, self._config.served_model_name, self._registry
        )
        await self._adapters.start()
        instance = worker_instance(self._config, self._slot, self.id, facts, address, self._metrics_url)
        self._presence = Presence(
            self._registry,
            msgspec.structs.replace(instance, adapters=self._adapters.listed),
            await self.card(),
            lambda: not self._queue.connected,
            lambda: self._engine_watch.stalled,
        )
        self._engine_watch.on_change = self._stall_changed
        if self._leader is not None:  # the lease ends after the engine, so it would keep the record too long
            stack.push_async_callback(self._presence.leave)
        await self._presence.wait_until_compatible()

    def _stall_changed(self) -> None:
        self._presence.changed.set()

    def _show_usage(self) -> None:
        engine, of = self._engine, (self._config.served_model_name, self._slot.role)
        ENGINE_REQUESTS.labels(*of, "running").set_function(lambda: engine.usage.running)
        ENGINE_REQUESTS.labels(*of, "waiting").set_function(lambda: engine.usage.waiting)
        ENGINE_STALLED.labels(*of).set_function(lambda: self._engine_watch.stalled)
        KV_USAGE.labels(*of).set_function(lambda: engine.usage.kv_usage)

    async def card(self) -> ModelCard | None:
        """The model card for frontends; None for a worker to which they do not connect."""
        return None

    def load(self) -> Load:
        usage = self._engine.usage
        return Load(usage.running, usage.waiting, round(usage.kv_usage, 6), queue_depth=self._queue.depth)

    def links(self) -> list[LinkState]:
        """Measurements of the links to other processes."""
        return []

    def watched(self) -> ProcessReport:
        return ProcessReport(self.load(), self.links(), outages=self.connections.outages())

    async def announce(self) -> None:
        await self._presence.announce()

    @abstractmethod
    async def _read_step(self, step: Step) -> None:
        """Process the outputs of an engine step."""

    async def _read_engine(self) -> None:
        """Read steps. Raises EngineDead when the engine is dead, and when a step cannot be read, because its tokens are
        lost."""
        while True:
            try:
                step = await self._engine.step()
            except EngineDead:
                raise
            except Exception as error:
                why = f"cannot read its step: {error_text(error)}"
                raise EngineDead(why, crashed=True) from error
            await self._read_step(step)

    def permanent(self) -> Mapping[str, Work]:
        leader, takes = self._leader, self._engine.max_adapters > 0
        followers = {"followers": partial(leader.watch, self.stop)} if leader else {}
        return {
            **followers,
            **({"adapters": partial(self._adapters.follow, self._presence.set_adapters)} if takes else {}),
            "engine steps": self._read_engine,
            "engine watch": self._engine_watch.run,
            "engine processes": self._engine.watch,
            "instance record": self._presence.keep_updated,
        }


def engine_spec(
    config: Config, slot: Slot, instance_id: str, credentials: Credentials | None, node: EngineNode | None
) -> EngineSpec:
    return EngineSpec(
        role=slot.role,
        instance=instance_id,
        model=config.model,
        served_model_name=config.served_model_name,
        engine_args=worker_config(config, slot).engine_args,
        disaggregated=slot.role.includes(Role.PREFILL)
        or (config.decode is not None and config.decode.remote_prefill),
        host=config.host,
        credentials=credentials,
        kv_offload=worker_config(config, slot).kv_offload,
        kv_offload_disk=worker_config(config, slot).kv_offload_disk,
        kv_offload_folder=str(disk_folder(config, worker_config(config, slot))),
        kv_port=slot.kv_port,
        node=node,
    )
