"""`pdserve decode|prefill --node-rank N`: a follower host of a worker that spans hosts (`nodes.py`). It runs its host's
ranks of the engine, and ends with the leader. Only the leader takes requests."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Self

from pdserve import registry
from pdserve.config.schema import Config
from pdserve.contract.records import NodeFollower
from pdserve.engine.spec import EngineNode, import_ranks
from pdserve.plan.slots import Slot, worker_config
from pdserve.process.life import Service
from pdserve.process.nodes import Follower, meeting_place, node_leader, start_with_hosts
from pdserve.process.presence import new_instance_id
from pdserve.process.worker import engine_spec
from pdserve.registry.base import Registry
from pdserve.runtime.tasks import Work
from pdserve.security.credentials import Credentials
from pdserve.util.errors import EngineDead

logger = logging.getLogger(__name__)

ENDS_WITHIN = 15.0
"""Seconds beyond the drain timeout to wait for the leader's end."""


class FollowerService(Service):
    def __init__(
        self,
        config: Config,
        slot: Slot,
        connected: Registry,
        credentials: Credentials | None,
        metrics_url: str,
    ) -> None:
        super().__init__(config, slot, new_instance_id(slot), metrics_url)
        self._credentials = credentials
        self._registry = connected
        self._section = worker_config(config, slot)
        self._make_ranks = import_ranks(self._section.engine)
        expected = node_leader(config, self._section, EngineNode(0, "", 0), "")
        record = NodeFollower(self.id, "", slot.node, config.host)
        self._node = Follower(connected, meeting_place(slot), expected, record)
        self.depends_on("etcd", config.etcd, lambda: connected.connected)

    @classmethod
    def connect(cls, config: Config, slot: Slot, metrics_url: str) -> Self:
        assert config.etcd is not None
        credentials = Credentials.load(config.security.credentials)
        connected = registry.connect(config.etcd, config.namespace, credentials, patient=True)
        return cls(config, slot, connected, credentials, metrics_url)

    async def start(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._registry)
        await stack.enter_async_context(self._node)
        leader = self._node.leader
        node = EngineNode(self._slot.node, leader.host, leader.port)
        spec = engine_spec(self._config, self._slot, leader.id, self._credentials, node)
        self._ranks = self._make_ranks(spec)
        await start_with_hosts(stack.enter_async_context(self._ranks), self._node)

    def permanent(self) -> Mapping[str, Work]:
        return {"leader": self._node.watch, "ranks": self._watch_ranks}

    async def announce(self) -> None:
        logger.info("this host's ranks of %s are ready", self._node.leader.id)

    async def drain(self) -> None:
        """Keep the ranks until the leader has finished its requests."""
        try:
            async with asyncio.timeout(self._config.drain_timeout + ENDS_WITHIN):
                await self._node.stop()
        except TimeoutError:
            logger.warning("leader %s has not ended in time; ending without it", self._node.leader.id)

    async def _watch_ranks(self) -> None:
        """Watch the ranks. During the drain their end is no failure, because they end with the leader."""
        try:
            await self._ranks.watch()
        except EngineDead:
            if not self.draining:
                raise
            await asyncio.Event().wait()
