"""The LoRA adapters of a worker: those of its file, and those that frontends load and unload at run time through the
registry. The worker's record lists them, for the routing in frontends."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from msgspec.structs import replace

from pdserve.config.lora_modules import static_adapters
from pdserve.contract.records import FROM_FILE, Adapter
from pdserve.engine.base import Engine
from pdserve.engine.lora import adapter_folder, adapter_id
from pdserve.registry import keys
from pdserve.registry.base import Registry
from pdserve.registry.view import RegistryView
from pdserve.runtime.tasks import reraise_fatal
from pdserve.util.errors import ConfigError

logger = logging.getLogger(__name__)
Key = tuple[str, str]
"""An adapter's name, and the id of the call that loaded it (`Adapter.asked`)."""
RETRY_AFTER = 30.0
"""Seconds until a failed load of a wanted adapter is retried."""
HIDDEN = "it is unloaded, or another adapter is loaded under its name"
"""Problem of an adapter that the worker's file names, and that clients cannot use any more."""
MAX_PROBLEM = 500
"""Maximum of characters in a problem: it is part of the worker's record."""


class WorkerAdapters:
    """Loads and unloads the adapters of a worker's engine. An adapter that a frontend unloads stays in the engine until
    another one needs its place, so that its requests can finish here or migrate to this worker."""

    def __init__(
        self, engine: Engine, engine_args: Mapping[str, object], model: str, registry: Registry
    ) -> None:
        self._engine = engine
        self._args = engine_args
        self._model = model
        self._registry = registry
        self._loaded: dict[Key, Adapter] = {}
        self._published: list[Adapter] | None = None
        self._retried_at = time.monotonic()

    @property
    def listed(self) -> list[Adapter] | None:
        """Adapters for the worker's record: those that were loaded or failed to load, and the others of the file. None:
        the engine has no LoRA."""
        hidden = (
            Adapter(name, path, problem=HIDDEN)
            for name, path in static_adapters(self._args).items()
            if (name, FROM_FILE) not in self._loaded
        )
        return [*self._loaded.values(), *hidden] if self._engine.max_adapters else None

    async def start(self) -> None:
        """Load the wanted adapters. Raises ConfigError if an adapter of the file cannot be loaded."""
        async with self._view() as view:
            await self._load(self._wanted(view))
        problems = [
            each.problem for each in self._loaded.values() if each.asked == FROM_FILE and each.problem
        ]
        if problems:
            raise ConfigError(problems)
        self._published = self.listed

    async def follow(self, changed: Callable[[list[Adapter] | None], Awaitable[None]]) -> None:
        """Load adapters as the registry changes, and call `changed` with the new list; never returns."""
        async with self._view() as view:
            async for _ in view.changes(every=RETRY_AFTER):
                await self._load(self._wanted(view))
                if self.listed != self._published:
                    await changed(adapters := self.listed)
                    self._published = adapters

    def _view(self) -> RegistryView:
        return RegistryView(self._registry, keys.ADAPTERS, keys.LOADING)

    def _wanted(self, view: RegistryView) -> dict[Key, Adapter]:
        kept = view.adapters(self._model)
        of_file = [
            Adapter(name, path) for name, path in static_adapters(self._args).items() if name not in kept
        ]
        wanted = [*of_file, *(each for each in kept.values() if each.path), *view.loading(self._model)]
        return {(each.name, each.asked): each for each in wanted}

    async def _load(self, wanted: Mapping[Key, Adapter]) -> None:
        if may_retry := time.monotonic() >= self._retried_at + RETRY_AFTER:
            self._retried_at = time.monotonic()
        for key, adapter in wanted.items():
            before = self._loaded.get(key)
            # a failed first load is not retried: its frontend reports the failure to the client
            is_first_load = not adapter.id and adapter.asked != FROM_FILE
            if before is None or (may_retry and before.problem and not is_first_load):
                loaded = await self._load_one(replace(adapter, model=""), wanted)
                self._loaded[key] = loaded
                if loaded != before:
                    level, found = logging.INFO, f"loaded as {loaded.id:x}"
                    if loaded.problem:
                        level, found = logging.WARNING, loaded.problem
                    logger.log(level, "adapter %s of %s: %s", adapter.name, adapter.path, found)
        self._drop(wanted)

    def _drop(self, wanted: Mapping[Key, Adapter]) -> None:
        """Drop unwanted entries, except one for each adapter that the engine still holds."""
        held = {0} | {each.id for key, each in self._loaded.items() if key in wanted}
        for key, each in list(self._loaded.items()):
            if key not in wanted and each.id in held:
                del self._loaded[key]
            held.add(each.id)

    async def _load_one(self, adapter: Adapter, wanted: Mapping[Key, Adapter]) -> Adapter:
        try:
            folder = adapter_folder(adapter.name, adapter.path)
            id = await asyncio.to_thread(adapter_id, folder, self._args)
            if adapter.id and id != adapter.id:
                raise ConfigError(
                    [f"{adapter.path} has other weights on this host than on the worker that loaded it first"]
                )
            if not any(each.id == id for each in self._loaded.values()):
                await self._make_room(wanted)
                await self._engine.load_adapter(id, folder)
                if await asyncio.to_thread(adapter_id, folder, self._args) != id:
                    await self._engine.unload_adapter(id)
                    raise ConfigError([f"the files of {adapter.path} changed while they were loaded"])
            return replace(adapter, id=id)
        except Exception as error:  # any error of the adapter's path or files
            reraise_fatal(error)
            return replace(adapter, id=0, problem=(str(error) or repr(error))[:MAX_PROBLEM])

    async def _make_room(self, wanted: Mapping[Key, Adapter]) -> None:
        """If the engine is full, unload an unwanted adapter that no request uses. Raises ConfigError if there is
        none."""
        ids = {each.id for each in self._loaded.values() if each.id}
        if len(ids) < (most := self._engine.max_adapters):
            return
        for id in ids - {each.id for key, each in self._loaded.items() if key in wanted}:
            if await self._engine.unload_adapter(id):
                self._loaded = {key: each for key, each in self._loaded.items() if each.id != id}
                return
        raise ConfigError([f"all adapter slots are in use (max-cpu-loras: {most}): unload one first"])
