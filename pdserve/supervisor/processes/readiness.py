"""Whether processes are ready and healthy: roles by their registration in etcd, frontends also by their answers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import msgspec

from pdserve.contract.records import Instance, Role, SlotState, encode_record
from pdserve.registry import keys
from pdserve.registry.base import Registry
from pdserve.registry.view import RegistryView
from pdserve.util.errors import RegistryUnavailable, error_text

logger = logging.getLogger(__name__)

MISSING = 60.0
"""seconds that a live process may be missing from the registry before it counts as hung: far more than a lease (10),
the time after an outage and a stall of the machine. By then no other process uses it any more."""
CHECK_EVERY = 1.0
"""seconds between two looks at the registry"""
FRONTEND_CHECK_EVERY = 0.25
"""seconds between two questions to frontends that are not ready"""
SAME_AGAIN = 0.02
"""seconds to the next question after an answer of a frontend that is known to be ready"""


async def until_unhealthy(healthy: Callable[[], Awaitable[bool]], every: float, limit: float) -> float:
    """Return when the check has failed for `limit` seconds on end, with these seconds. Checks are counted and time is
    not measured: a supervisor that was stopped itself knows nothing of that time."""
    failing = 0.0
    while failing < limit:
        await asyncio.sleep(every)
        failing = 0.0 if await healthy() else failing + every
    return failing


class RegisteredInstances:
    """The supervisor's side of the registry. A role is ready when it is registered."""

    def __init__(
        self, registry: Registry, view: RegistryView, host: str, leaving: float = 0.0, model: str = ""
    ) -> None:
        """`host` is this machine, and `model` its workers', for the reports. `leaving` are the seconds that a process
        may go on after it removed its instance (a frontend that drains)."""
        self.registry = registry
        self.view = view
        self._host, self._model = host, model
        self._patience = MISSING + leaving

    async def until_registered(self, instance_id: str, pid: int) -> Instance:
        """Wait until this instance is registered by the process `pid`."""
        async for _ in self.view.changes():
            for instance in self.view.instances():
                if instance.id == instance_id and instance.pid == pid:
                    return instance
        raise AssertionError("the registry's changes never end")

    async def until_missing(self, instance: Instance) -> float:
        """Wait until the registry has lacked this instance for long, although a process that works renews its lease;
        return the seconds. Time without a registry does not count."""

        async def registered() -> bool:
            listed = any(each.id == instance.id for each in self.view.instances())
            return listed or not self.registry.connected

        return await until_unhealthy(registered, CHECK_EVERY, self._patience)

    async def remove(self, instance: Instance) -> None:
        """Remove the instance and the card of a dead process, so that other processes need not wait for its lease to
        expire."""
        try:
            await self.registry.delete(keys.instance(instance))
            if instance.model:
                await self.registry.delete(keys.card(instance.model, instance.id))
        except RegistryUnavailable:
            logger.debug("%s stays listed until its lease runs out: etcd is away", instance.id)

    async def report(self, state: SlotState) -> None:
        """Publish the state of a process."""
        model = "" if state.role is Role.FRONTEND else self._model
        state = msgspec.structs.replace(state, host=self._host, model=model)
        await self.registry.put(keys.slot(state), encode_record(state))


async def until_frontends_ready(url: str, processes: int) -> AsyncIterator[str]:
    """Yield what a frontend reports as missing, until as many frontends as `processes` have reported to be ready. They
    share one port, and which of them answers is chance."""
    ready: set[str] = set()
    # these are this machine's own: no proxy stands before them, and no name of theirs need be in their certificate
    async with httpx.AsyncClient(
        headers={"connection": "close"}, timeout=5, trust_env=False, verify=False
    ) as client:
        while len(ready) < processes:
            id, missing = await _ask(client, url)
            if missing or id in ready:
                yield missing or f"{len(ready)} of {processes} frontends have answered"
                await asyncio.sleep(FRONTEND_CHECK_EVERY if missing else SAME_AGAIN)
            ready = set() if missing else ready | {id}


async def _ask(client: httpx.AsyncClient, url: str) -> tuple[str, str]:
    """The id of the frontend that answers, and what is missing."""
    try:
        answer = await client.get(f"{url}/health")
    except httpx.HTTPError as error:
        return "", error_text(error)
    try:
        health = answer.json()
        return str(health["frontend"]), str(health.get("missing", ""))
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", f"HTTP {answer.status_code}"
