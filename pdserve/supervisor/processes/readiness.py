"""Finds out whether roles are ready and healthy: by their registration in etcd, and frontends also by `/health`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import msgspec

from pdserve.contract.records import Instance, Role, SlotState, encode_record
from pdserve.registry import keys
from pdserve.registry.base import Registry
from pdserve.registry.view import RegistryView
from pdserve.supervisor.processes.child import CONFIG_ERROR
from pdserve.supervisor.processes.restarts import CannotStart
from pdserve.util.errors import RegistryUnavailable, error_text

logger = logging.getLogger(__name__)

MISSING = 60.0
"""Seconds for which a live process may be missing in the registry before it counts as hung: far longer than a lease
(10) or a reconnect."""
CHECK_INTERVAL = 1.0
"""Seconds between two checks of the registry."""
FRONTEND_CHECK_INTERVAL = 0.25
"""Seconds between two checks while frontends are not ready."""
KNOWN_FRONTEND_DELAY = 0.02
"""Seconds to the next check after the answer of a frontend that is already known to be ready."""


async def until_unhealthy(healthy: Callable[[], Awaitable[bool]], interval: float, limit: float) -> float:
    """Check every `interval` seconds until the check has failed for `limit` seconds in a row; return these
    seconds. They are counted in checks, because the supervisor itself may be stopped (SIGSTOP)."""
    failing = 0.0
    while failing < limit:
        await asyncio.sleep(interval)
        failing = 0.0 if await healthy() else failing + interval
    return failing


class RegisteredInstances:
    """The supervisor's side of the registry. A role is ready when it is registered."""

    def __init__(
        self, registry: Registry, view: RegistryView, host: str, leaving: float = 0.0, model: str = ""
    ) -> None:
        """`host` and `model` are for the slot records. `leaving`: seconds that a process may run after it removed its
        instance (a frontend that drains)."""
        self.registry = registry
        self.view = view
        self._host, self._model = host, model
        self._patience = MISSING + leaving

    async def until_registered(self, instance_id: str, pid: int) -> Instance:
        async for _ in self.view.changes():
            for instance in self.view.instances():
                if instance.id == instance_id and instance.pid == pid:
                    return instance
        raise AssertionError("the registry's changes never end")

    async def until_missing(self, instance: Instance) -> float:
        """Wait until the instance has been missing in the registry for too long; return the seconds. Time without etcd
        does not count."""

        async def registered() -> bool:
            listed = any(each.id == instance.id for each in self.view.instances())
            return listed or not self.registry.connected

        return await until_unhealthy(registered, CHECK_INTERVAL, self._patience)

    async def remove(self, instance: Instance) -> None:
        """Remove the instance and the card of a dead process before its lease expires."""
        try:
            await self.registry.delete(keys.instance(instance))
            if instance.model:
                await self.registry.delete(keys.card(instance.model, instance.id))
        except RegistryUnavailable:
            logger.debug("%s stays registered until its lease expires: etcd is unreachable", instance.id)

    async def report(self, state: SlotState) -> None:
        """Write the slot record of a process."""
        model = "" if state.role is Role.FRONTEND else self._model
        state = msgspec.structs.replace(state, host=self._host, model=model)
        await self.registry.put(keys.slot(state), encode_record(state))


async def until_frontends_ready(url: str, processes: int) -> AsyncIterator[str]:
    """Yield what frontends report as missing, until `processes` different frontends have reported that they are ready.
    Frontends share one port, so each check reaches a random one. Raises CannotStart if a frontend refuses the model's
    configuration."""
    ready: set[str] = set()
    # they run on this machine: no proxy, and their certificate may be for other names
    async with httpx.AsyncClient(
        headers={"connection": "close"}, timeout=5, trust_env=False, verify=False
    ) as client:
        while len(ready) < processes:
            id, missing, refused = await _ask(client, url)
            if refused:
                raise CannotStart(f"{id} refuses the model: {missing}", CONFIG_ERROR)
            if missing or id in ready:
                yield missing or f"{len(ready)} of {processes} frontends have answered"
                await asyncio.sleep(FRONTEND_CHECK_INTERVAL if missing else KNOWN_FRONTEND_DELAY)
            ready = set() if missing else ready | {id}


async def _ask(client: httpx.AsyncClient, url: str) -> tuple[str, str, bool]:
    """The id of the frontend that responds, what it reports as missing, and whether it refuses the model."""
    try:
        response = await client.get(f"{url}/health")
    except httpx.HTTPError as error:
        return "", error_text(error), False
    try:
        health = response.json()
        return str(health["frontend"]), str(health.get("missing", "")), bool(health.get("refused"))
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", f"HTTP {response.status_code}", False
