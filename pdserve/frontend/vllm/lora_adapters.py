"""LoRA adapters of the served models: their list, and loading and unloading at run time, on all workers of a model or
on none (docs/decisions/0075-lora-adapters.md)."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from pdserve.contract.records import FROM_FILE, Adapter, Instance, encode_record
from pdserve.registry import keys
from pdserve.registry.base import Registry
from pdserve.registry.view import RegistryView
from pdserve.util.errors import BadRequest, ConfigError, Unavailable

LOAD_TIMEOUT = 60.0
"""Seconds for all workers to load an adapter."""
CLAIM_TIMEOUT = 10.0
"""Seconds for a frontend to see its own claim in the registry."""


def servable_adapters(
    kept: Mapping[str, Adapter], workers: Sequence[Instance], before: Mapping[str, Adapter] = {}
) -> dict[str, Adapter]:
    """Return the adapters that clients may name: those loaded at run time (`kept`), and those of the workers' files
    unless unloaded. If workers have different versions of an adapter, the most frequent one is returned. Without
    workers, the adapters of `before` stay, because requests for them wait for a worker. Pure."""
    found: dict[str, Counter[Adapter]] = {}
    theirs = (each for worker in workers for each in worker.adapters or ())
    for each in theirs if workers else before.values():
        if not each.problem and each.asked == (kept[each.name].asked if each.name in kept else FROM_FILE):
            found.setdefault(each.name, Counter())[each] += 1
    return {name: counts.most_common(1)[0][0] for name, counts in sorted(found.items())}


class AdapterStore:
    """Loads and unloads adapters on all workers of a model, through the registry."""

    def __init__(self, registry: Registry, view: RegistryView) -> None:
        self._registry = registry
        self._view = view

    @asynccontextmanager
    async def claimed(self, model: str, name: str) -> AsyncIterator[None]:
        """Hold a lock on an adapter name against all frontends and models. Raises BadRequest if the name is taken or
        locked, and Unavailable.

        The lock is a key under this frontend's lease. Changes arrive in the order in which etcd made them, so once the
        view has the key, it also has every earlier change."""
        claim, mine = keys.claim(name), secrets.token_hex(8)
        if not await self._registry.create(claim, mine.encode()):
            raise BadRequest(f"The lora adapter '{name}' is being loaded by another call.", "lora_name")
        try:
            await self._wait_for_claim(name, mine)
            if name in self._view.cards().keys() - {model} or name in self._names_beside(model):
                taken = f"'{name}' is the name of another model, or of its adapter: choose another name."
                raise BadRequest(taken, "lora_name")
            yield
        finally:
            await self._registry.delete(claim)

    async def _wait_for_claim(self, name: str, mine: str) -> None:
        try:
            async with asyncio.timeout(CLAIM_TIMEOUT):
                async for _ in self._view.changes():
                    if self._view.claim(name) == mine:
                        return
        except TimeoutError:
            raise Unavailable("this frontend does not see the registry's changes") from None

    async def load(self, model: str, name: str, path: str) -> None:
        """Return once all workers of the model have the adapter; later ones will load it too. Call with the name
        `claimed`. Raises ConfigError or Unavailable; then no worker keeps it."""
        asked = Adapter(name, path, asked=secrets.token_hex(8), model=model)
        await self._registry.put(keys.loading(asked), encode_record(asked))
        try:
            async with asyncio.timeout(LOAD_TIMEOUT):
                id = await self._wait_for_load(asked)
            await self._keep(replace(asked, id=id), keys.claim(name))
        except TimeoutError:
            silent = _silent(self._workers(model), asked)
            left = ", ".join(silent) or f"the workers of {model} (none is registered)"
            raise Unavailable(f"{left} did not load adapter {name} within {LOAD_TIMEOUT:g} s") from None
        finally:
            await self._registry.delete(keys.loading(asked))

    async def unload(self, model: str, name: str) -> None:
        """Remove an adapter; its running requests finish. If a worker's file may list its name, the registry gets a
        record that it is unloaded."""
        before, workers = self._view.adapters(model).get(name), self._view.instances(model=model)
        of_files = {
            each.name for worker in workers for each in worker.adapters or () if each.asked == FROM_FILE
        }
        if name in of_files or not workers:
            await self._keep(Adapter(name, asked=secrets.token_hex(8), model=model))
        elif before is not None:
            await self._registry.delete(keys.adapter(before))
            await self._until(lambda: self._view.adapters(model).get(name) != before)

    async def _keep(self, adapter: Adapter, claim: str = "") -> None:
        """Write the adapter, and return once the view has it or a later change. Raises RegistryUnavailable, also if the
        claim is lost."""
        before = self._view.adapters(adapter.model).get(adapter.name)
        key, value = keys.adapter(adapter), encode_record(adapter)
        await self._registry.put(key, value, leased=False, holding=claim)
        await self._until(lambda: self._view.adapters(adapter.model).get(adapter.name) != before)

    async def _until(self, done: Callable[[], bool]) -> None:
        async for _ in self._view.changes():
            if done():
                return

    async def _wait_for_load(self, asked: Adapter) -> int:
        async for _ in self._view.changes():
            workers = self._workers(asked.model)
            if workers and not _silent(workers, asked):
                return _agreed(workers, asked)
        raise AssertionError("a view ends with its frontend")

    def _names_beside(self, model: str) -> set[str]:
        """Names of the adapters of other models, with or without workers. Unloaded adapters are left out."""
        found = set[str]()
        models = {each.model for each in self._view.instances()} | {
            each.model for each in self._view.all_adapters()
        }
        for other in models - {model}:
            kept = self._view.adapters(other)
            found.update(servable_adapters(kept, self._view.instances(model=other)))
            found.update(each.name for each in kept.values() if each.path)
        return found

    def _workers(self, model: str) -> list[Instance]:
        return [worker for worker in self._view.instances(model=model) if not worker.draining]


def _silent(workers: Iterable[Instance], asked: Adapter) -> list[str]:
    """Ids of the workers with LoRA that have not reported on the adapter."""
    return [each.id for each in workers if each.adapters is not None and not _report(each, asked)]


def _report(worker: Instance, asked: Adapter) -> Adapter | None:
    return next((each for each in worker.adapters or () if each.asked == asked.asked), None)


def _agreed(workers: Iterable[Instance], asked: Adapter) -> int:
    """Return the adapter's id if all workers loaded it. Raises ConfigError."""
    reports = {worker.id: _report(worker, asked) for worker in workers}
    for worker, report in reports.items():
        if report is None:
            raise ConfigError([f"{worker} runs without enable-lora: set it in the sections of all workers"])
        if report.problem:
            raise ConfigError([f"{worker}: {report.problem}"])
    ids = {report.id for report in reports.values() if report}
    if len(ids) > 1:
        raise ConfigError([f"the files in {asked.path} differ between the hosts of {', '.join(reports)}"])
    return ids.pop()
