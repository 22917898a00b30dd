"""A typed copy of the registry that follows its changes, for routing, decisions and reports."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from pdserve.contract.records import (
    Adapter,
    Instance,
    ModelCard,
    NodeFollower,
    NodeLeader,
    Role,
    SlotState,
    decode_adapter,
    decode_card,
    decode_follower,
    decode_instance,
    decode_leader,
    decode_slot_state,
)
from pdserve.contract.reports import LOST_LIFETIME, LostProcess
from pdserve.registry import keys
from pdserve.registry.base import Change, Registry
from pdserve.runtime.tasks import Lifetime, TaskOwner
from pdserve.util.errors import ProtocolError, RegistryUnavailable

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_READ_TIMEOUT = 5.0
MIN_PAUSE = 0.05
"""Minimum of seconds between two yields of `changes`."""


class Snapshot(NamedTuple):
    """The results of the RegistryView methods of these names."""

    instances: list[Instance]
    slots: list[SlotState]
    cards: dict[str, list[tuple[str, ModelCard]]]
    settings: dict[str, str]


class RegistryView(Lifetime):
    """Follows the keys below the prefixes, or the whole namespace. A process should follow only the keys that it needs,
    because each change goes to all followers. Enter the view inside the registry's `async with`. Entering returns when
    the present keys have been read, and raises RegistryUnavailable after a few seconds unless the registry is patient.

    During an outage the view does not change. Undecodable values are logged and left out. Instances and cards are in
    the order of their keys, which is the same in all processes.
    """

    def __init__(self, registry: Registry, *prefixes: str) -> None:
        self.version = 0
        """number of updates; 0 until the present keys have been read"""
        self._registry = registry
        self._prefixes = prefixes or ("",)
        self._all: list[_Records[Any]] = []
        self._instances = self._records(keys.INSTANCES, decode_instance)
        self._cards = self._records(keys.CARDS, decode_card)
        self._newcomers = self._records(keys.NEWCOMERS, decode_instance)
        self._settings = self._records(keys.SETTINGS, bytes.decode)
        self._slots = self._records(keys.SLOTS, decode_slot_state)
        self._leaders = self._records(keys.LEADERS, decode_leader)
        self._followers = self._records(keys.FOLLOWERS, decode_follower)
        self._adapters = self._records(keys.ADAPTERS, decode_adapter)
        self._loading = self._records(keys.LOADING, decode_adapter)
        self._claims = self._records(keys.CLAIMS, bytes.decode)
        self.replaced = Counter[tuple[str, Role]]()
        """by model and role: number of lost processes that another has replaced"""
        self._lost: dict[str, tuple[Instance, float, int]] = {}
        """by id: a process whose lease ended while it was not draining, the monotonic time of that end, and the number
        of processes of its model and role before that. The process counts as replaced when there are as many again"""
        self._cached: dict[tuple[Role | None, str | None], list[Instance]] = {}
        """results of `instances` until the next change"""
        self._changed = asyncio.Condition()

    def _records(self, prefix: str, decode: Callable[[bytes], T]) -> "_Records[T]":
        records = _Records(prefix, decode)
        self._all.append(records)
        return records

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        async with TaskOwner() as tasks:
            tasks.forever(self._follow, "registry view")
            try:
                async with asyncio.timeout(None if self._registry.patient else FIRST_READ_TIMEOUT):
                    await anext(self.changes())
            except TimeoutError:
                raise RegistryUnavailable("the registry could not be read") from None
            yield

    def instances(self, role: Role | None = None, model: str | None = None) -> list[Instance]:
        """Return the live instances that do this role's work, including draining ones. A frontend's model is ''."""
        found = self._cached.get((role, model))
        if found is None:
            found = self._cached[role, model] = [
                instance
                for _, instance in sorted(self._instances.items())
                if (role is None or instance.role.includes(role))
                and (model is None or instance.model == model)
            ]
        return found.copy()

    def newcomers(self, role: Role, model: str) -> list[Instance]:
        """Return the workers that do not serve yet and warm up."""
        newcomers = [worker for _, worker in sorted(self._newcomers.items())]
        return [worker for worker in newcomers if worker.role.includes(role) and worker.model == model]

    def cards(self) -> dict[str, list[tuple[str, ModelCard]]]:
        """Return the cards of each model name, each with the id of the instance that wrote it."""
        cards: dict[str, list[tuple[str, ModelCard]]] = {}
        for key, card in sorted(self._cards.items()):
            model, instance_id = keys.split_card(key)
            cards.setdefault(model, []).append((instance_id, card))
        return cards

    def settings(self) -> dict[str, str]:
        """Return the live settings, not validated."""
        return {key.removeprefix(keys.SETTINGS): value for key, value in self._settings.items()}

    def slots(self) -> list[SlotState]:
        """Return the processes that supervisors run, and processes that may not register (`REFUSED`)."""
        return [state for _, state in sorted(self._slots.items())]

    def leaders(self) -> list[NodeLeader]:
        return [leader for _, leader in sorted(self._leaders.items())]

    def followers(self) -> list[NodeFollower]:
        return [follower for _, follower in sorted(self._followers.items())]

    def adapters(self, model: str) -> dict[str, Adapter]:
        """Return the adapters that frontends loaded or unloaded at run time, by name."""
        return {each.name: each for each in self.all_adapters() if each.model == model}

    def all_adapters(self) -> list[Adapter]:
        return [each for _, each in sorted(self._adapters.items())]

    def loading(self, model: str) -> list[Adapter]:
        """Return the adapters that frontends are loading now."""
        return [each for _, each in sorted(self._loading.items()) if each.model == model]

    def claim(self, name: str) -> str:
        """Return the claim of the frontend that is loading an adapter with this name; '': none."""
        return self._claims.get(keys.claim(name), "")

    def snapshot(self) -> Snapshot:
        return Snapshot(self.instances(), self.slots(), self.cards(), self.settings())

    def lost_processes(self) -> list[LostProcess]:
        """Return the recently lost processes that were not replaced."""
        now = time.monotonic()
        return [
            LostProcess(lost.id, lost.host, now - since, lost.model)
            for lost, since, _ in self._lost.values()
            if now - since < LOST_LIFETIME
        ]

    async def changes(self, every: float | None = None) -> AsyncIterator[None]:
        """Yield when the present keys have been read, then after changes, or after `every` seconds. Several changes may
        be merged into one yield, so a caller should read everything each time."""
        seen = 0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(every if seen else None):
                    await self._newer_than(seen)
            seen = self.version
            yield
            await asyncio.sleep(MIN_PAUSE)

    async def _newer_than(self, version: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.version != version)

    async def _follow(self) -> None:
        """Apply the changes. The first list has all present keys. If this runs again after an error, known instances
        that are not in the first list were lost meanwhile."""
        before: dict[str, Instance] | None = dict(self._instances)
        async for changes in self._registry.watch(*self._prefixes):
            if before is not None:
                for records in self._all:
                    records.clear()
            for change in changes:
                self._apply(change)
            if before is not None:
                self._record_missing(before)
            before = None
            self._forget_replaced()
            self._cached.clear()
            async with self._changed:
                self.version += 1
                self._changed.notify_all()

    def _apply(self, change: Change) -> None:
        instance = self._instances.get(change.key)
        if change.value is None and instance:
            self._record_loss(instance, self._count_kinds()[_kind(instance)])
        for records in self._all:
            if change.key.startswith(records.prefix):
                records.apply(change)

    def _record_loss(self, instance: Instance, before: int) -> None:
        """Record the end of a lease, unless the process drained. `before`: number of its kind before that end."""
        if not instance.draining:
            self._lost[instance.id] = instance, time.monotonic(), before

    def _record_missing(self, before: Mapping[str, Instance]) -> None:
        counts = self._count_kinds()
        for instance in (instance for key, instance in before.items() if key not in self._instances):
            counts[_kind(instance)] += 1
            self._record_loss(instance, counts[_kind(instance)])

    def _count_kinds(self) -> Counter[tuple[str, Role]]:
        return Counter(map(_kind, self._instances.values()))

    def _forget_replaced(self) -> None:
        counts = self._count_kinds()
        ids = {instance.id for instance in self._instances.values()}
        for lost, since, before in list(self._lost.values()):
            replaced = counts[_kind(lost)] >= before
            if replaced or time.monotonic() - since > LOST_LIFETIME:
                del self._lost[lost.id]
                # an instance that is registered again was not replaced: only its lease had expired
                self.replaced[_kind(lost)] += replaced and lost.id not in ids


def _kind(instance: Instance) -> tuple[str, Role]:
    return instance.model, instance.role


class _Records(dict[str, T]):
    """The decoded values below a prefix, by key."""

    def __init__(self, prefix: str, decode: Callable[[bytes], T]) -> None:
        super().__init__()
        self.prefix = prefix
        self._decode = decode

    def apply(self, change: Change) -> None:
        self.pop(change.key, None)
        if change.value is None:
            return
        try:
            self[change.key] = self._decode(change.value)
        except (ProtocolError, UnicodeDecodeError) as error:
            logger.warning("registry: skipped %s: %s", change.key, error)
