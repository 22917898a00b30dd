"""The registry records of a process: its instance and its model card. Each change goes to every process, so these
records leave out the load, which changes with each step (`WorkerLoad`, `observe/process_pages.py`)."""

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from pdserve import __version__
from pdserve.config.schema import Config
from pdserve.contract.live_settings import slo_settings
from pdserve.contract.records import (
    REFUSED,
    WIRE,
    Adapter,
    Instance,
    ModelCard,
    Role,
    SlotState,
    encode_record,
    is_compatible,
)
from pdserve.engine.base import EngineFacts
from pdserve.plan.graph import BOOT_VARIABLE
from pdserve.plan.slots import Slot
from pdserve.registry import keys
from pdserve.registry.base import Registry
from pdserve.registry.view import RegistryView
from pdserve.util import clock
from pdserve.util.errors import RegistryUnavailable
from pdserve.util.ticks import until_tick

logger = logging.getLogger(__name__)

WARM_UP_WITHIN = 5.0
"""Maximum of seconds for warm-ups before a worker is announced."""
MAX_PAIRS = 16
"""Maximum of prefill workers with which a decode worker warms up: among hundreds of workers, all pairs would be too
many handshakes."""
INTERVAL = 1.0
"""Seconds between two checks of `queue_lost` and `stalled`."""


def new_instance_id(slot: Slot) -> str:
    """`<role>-<index>-<boot id>`: a restarted process is a new instance. The boot id comes from the supervisor, if
    there is one."""
    return instance_id(slot.name, os.environ.get(BOOT_VARIABLE) or new_boot())


def new_boot() -> str:
    return secrets.token_hex(4)


def instance_id(name: str, boot: str) -> str:
    return f"{name}-{boot}"


def worker_instance(
    config: Config, slot: Slot, instance_id: str, facts: EngineFacts, address: str, metrics: str
) -> Instance:
    return Instance(
        id=instance_id,
        role=slot.role,
        model=config.served_model_name,
        address=address,
        metrics=metrics,
        kv=facts.side_channel,
        host=config.host,
        pid=os.getpid(),
        gpus=list(slot.gpus),
        kv_blocks=facts.kv_blocks,
        block_size=facts.block_size,
        kv_tokens=facts.kv_tokens,
        host_tokens=facts.host_blocks * facts.block_size,
        disk_tokens=facts.disk_blocks * facts.block_size,
        max_model_len=facts.max_model_len,
        max_num_seqs=facts.max_num_seqs,
        max_concurrency=round(facts.max_concurrency, 2),
        vllm_version=facts.vllm_version,
        fingerprint=facts.fingerprint,
        settings=_settings(config, slot.role),
        prefills_remotely=slot.role is Role.DECODE
        and config.decode is not None
        and config.decode.remote_prefill,
    )


def _settings(config: Config, role: Role) -> dict[str, str]:
    """The model's SLO and, if the worker chooses between local and remote prefill, the settings of that choice."""
    slo = slo_settings(config.slo)
    decode = config.decode if role.includes(Role.DECODE) else None
    if decode is None or not (decode.remote_prefill and decode.conditional_disagg):
        return slo
    return slo | {
        "policy": str(decode.policy),
        "max-local-prefill-length": str(decode.max_local_prefill_length),
        "max-prefill-queue-size": str(decode.max_prefill_queue_size),
    }


def model_card(config: Config, facts: EngineFacts, archive: str, others: Iterable[ModelCard]) -> ModelCard:
    """The card of a decode worker. The context length is the engine's, and a chat template's text replaces its file.
    `others`: the registered cards of the same name."""
    assert config.decode is not None
    arguments = dict(config.decode.engine_args)
    arguments["max-model-len"] = facts.max_model_len
    template = arguments.get("chat-template")
    if isinstance(template, str) and "\n" not in template and Path(template).is_file():
        arguments["chat-template"] = Path(template).read_text("utf-8")
    card = ModelCard(
        name=config.served_model_name,
        model=config.model,
        engine_args=arguments,
        max_model_len=facts.max_model_len,
        vllm_version=facts.vllm_version,
        blob=archive,
        supported_tasks=facts.supported_tasks,
        created=int(clock.unix()),
        fingerprint=facts.fingerprint,
    )
    return msgspec.structs.replace(card, generation=generation(card, list(others)))


def generation(card: ModelCard, others: list[ModelCard]) -> int:
    """The highest generation of `others` that are interchangeable with the card; if none is, the next generation."""
    if alike := [other.generation for other in others if other.is_interchangeable(card)]:
        return max(alike)
    return 1 + max((other.generation for other in others), default=0)


def refusal(registered: Sequence[Instance]) -> str:
    """Why a process of this build may not register while these are registered; empty if it may. Pure."""
    far = [instance for instance in registered if not is_compatible(instance.wire)]
    if not far:
        return ""
    other, more = far[0], f" and {len(far) - 1} more" if len(far) > 1 else ""
    return (
        f"pdserve {__version__} (wire {WIRE}) cannot work beside {other.id}{more} of pdserve "
        f"{other.version or '0.1.0'} (wire {other.wire}): only builds whose wires differ by 1 at most understand each "
        "other. It joins when those have ended; to upgrade without downtime, install the releases in between first"
    )


class Presence:
    """Keeps the records of a process in the registry, under its lease, which removes them when the process leaves."""

    def __init__(
        self,
        registry: Registry,
        instance: Instance,
        card: ModelCard | None,
        queue_lost: Callable[[], bool] = lambda: False,
        stalled: Callable[[], bool] = lambda: False,
    ) -> None:
        """`queue_lost` and `stalled` return the present values of the instance's fields of these names."""
        self.instance = msgspec.structs.replace(instance, version=__version__, wire=WIRE)
        self._queue_lost, self._stalled = queue_lost, stalled
        self.changed = asyncio.Event()
        """Set it to write a change of `queue_lost` or `stalled` at once."""
        self._newcomer = False
        """Whether `warm_up` wrote a key under `keys.NEWCOMERS`."""
        self.announced = asyncio.Event()
        self._left = False
        self._writing = asyncio.Lock()
        self._registry = registry
        self._card = card

    async def wait_until_compatible(self) -> None:
        """Wait until this build understands every registered process (`is_compatible`). Meanwhile `pdserve status`
        lists this process as refused."""
        slot = SlotState(self.instance.id, self.instance.role, self.instance.host, REFUSED)
        async with RegistryView(self._registry, keys.INSTANCES) as view:
            async for _ in view.changes():
                if not (why := refusal(view.instances())):
                    break
                if why != slot.cause:
                    logger.error("not registered, waiting: %s", why)
                    slot = msgspec.structs.replace(slot, cause=why)
                    await self._registry.put(keys.slot(slot), encode_record(slot))
        if slot.cause:
            await self._registry.delete(keys.slot(slot))

    async def warm_up(self, view: RegistryView, warm: Callable[[], Awaitable[None]]) -> None:
        """Register the worker as a newcomer, so that workers of the other role warm up with it. Then run `warm`, its
        own warm-ups with them. All this takes at most `WARM_UP_WITHIN` seconds.

        Of two workers that start together, at least one sees the other, because each first waits for its own record."""
        self._newcomer = True
        await self._registry.put(keys.newcomer(self.instance), encode_record(self.instance))
        try:
            async with asyncio.timeout(WARM_UP_WITHIN):
                await self._seen(view)
                await warm()
        except TimeoutError:
            logger.warning(
                "warm-up with workers of the other role not complete after %g s; announcing", WARM_UP_WITHIN
            )

    async def _seen(self, view: RegistryView) -> None:
        async for _ in view.changes():
            newcomers = view.newcomers(self.instance.role, self.instance.model)
            if self.instance.id in {worker.id for worker in newcomers}:
                return

    async def set_card(self, card: ModelCard | None) -> None:
        """Write the card, or remove the registered one."""
        if card is not None:
            await self._registry.put(keys.card(card.name, self.instance.id), encode_record(card))
        elif self._card is not None:
            await self._registry.delete(keys.card(self._card.name, self.instance.id))
        self._card = card

    async def announce(self) -> None:
        """Write the card before the instance, so that a frontend that sees the instance finds its card."""
        await self.set_card(self._card)
        self._refresh()
        await self._write()
        if self._newcomer:  # if there is no key, a deletion would only wait for etcd
            await self._registry.delete(keys.newcomer(self.instance))
        self.announced.set()

    async def drain(self) -> None:
        """Register that this process takes no new requests."""
        self.instance = msgspec.structs.replace(self.instance, draining=True)
        await self._write()

    async def set_address(self, address: str) -> None:
        """Register another address; empty for none."""
        if address != self.instance.address:
            self.instance = msgspec.structs.replace(self.instance, address=address)
            if self.announced.is_set():
                await self._write()

    async def set_adapters(self, adapters: list[Adapter] | None) -> None:
        self.instance = msgspec.structs.replace(self.instance, adapters=adapters)
        if self.announced.is_set():
            await self._write()

    async def leave(self) -> None:
        """Remove the instance, and do not write it again."""
        self._left = True
        with suppress(RegistryUnavailable):
            async with self._writing:
                await self._registry.delete(keys.instance(self.instance))

    async def keep_updated(self) -> None:
        """Write each change of `queue_lost` and `stalled` after the announcement; never returns."""
        await self.announced.wait()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(until_tick(INTERVAL)):
                    await self.changed.wait()
            self.changed.clear()
            before = self.instance
            self._refresh()
            if self.instance != before:
                await self._write()

    def _refresh(self) -> None:
        now = {"queue_lost": self._queue_lost(), "stalled": self._stalled()}
        self.instance = msgspec.structs.replace(self.instance, **now)

    async def _write(self) -> None:
        async with self._writing:
            if not self._left:
                await self._registry.put(keys.instance(self.instance), encode_record(self.instance))
