"""Who a worker is: its instance id, and the records that describe it."""

import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from pdserve import clock
from pdserve.config.schema import Config, WorkerConfig
from pdserve.engine.base import EngineFacts
from pdserve.graph import BOOT_VARIABLE
from pdserve.messages import Instance, ModelCard, Role
from pdserve.plan.slots import Slot


def new_instance_id(slot: Slot) -> str:
    """`<role>-<index>-<boot id>`: a restarted worker is a new instance, and KV of its earlier life is
    nobody's. The boot id is the supervisor's, where there is one."""
    return instance_id(slot.name, os.environ.get(BOOT_VARIABLE) or new_boot())


def new_boot() -> str:
    return secrets.token_hex(4)


def instance_id(name: str, boot: str) -> str:
    return f"{name}-{boot}"


def worker_config(config: Config, role: Role) -> WorkerConfig:
    section = config.decode if role is Role.DECODE else config.prefill
    assert section is not None, f"{config.path} has no section for a {role.value} worker"
    return section


def describe(
    config: Config, slot: Slot, instance_id: str, facts: EngineFacts, address: str, metrics: str
) -> Instance:
    return Instance(
        id=instance_id,
        role=slot.role,
        model=config.served_model_name,
        address=address,
        metrics=metrics,
        host=config.host,
        pid=os.getpid(),
        gpus=list(slot.gpus),
        kv_blocks=facts.kv_blocks,
        block_size=facts.block_size,
        kv_tokens=facts.kv_tokens,
        max_model_len=facts.max_model_len,
        max_num_seqs=facts.max_num_seqs,
        max_concurrency=round(facts.max_concurrency, 2),
        vllm_version=facts.vllm_version,
        fingerprint=facts.fingerprint,
    )


def model_card(
    config: Config, facts: EngineFacts, archive: str = "", others: Iterable[ModelCard] = ()
) -> ModelCard:
    """All of the worker's engine arguments are in it: which of them matter to a frontend is the frontend's
    knowledge. The length is the one that the engine settled on, and a chat template in a file of this host
    comes as its text. `others` are those that are there under this name: a new kind of card is the next generation."""
    arguments = dict(worker_config(config, Role.DECODE).engine_args)
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
    return msgspec.structs.replace(card, generation=_generation(card, list(others)))


def _generation(card: ModelCard, others: Sequence[ModelCard]) -> int:
    if alike := [other.generation for other in others if other.alike(card)]:
        return max(alike)
    return 1 + max((other.generation for other in others), default=0)
