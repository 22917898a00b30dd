"""The settings that an engine is started with, and the choice of its implementation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.contract.records import Role
from pdserve.engine.base import Engine, Ranks
from pdserve.security.credentials import Credentials
from pdserve.util.imports import import_without_gc

ENGINES = {"vllm": "pdserve.engine.vllm.engine:VllmEngine", "sim": "pdserve.engine.sim.engine:SimEngine"}
"""By the `engine` key of a worker's section. Import strings, so that only the chosen module is loaded."""
RANKS = {"vllm": "pdserve.engine.vllm.process:VllmRanks", "sim": "pdserve.engine.sim.ranks:SimRanks"}


@dataclass(frozen=True)
class EngineNode:
    """A host of an engine that spans hosts (vLLM's `nnodes`)."""

    rank: int
    """0: the leader, which has the engine core; the other hosts have only ranks of the model."""
    host: str
    """The leader's address."""
    port: int
    """The leader's port for torch's store."""


@dataclass(frozen=True)
class EngineSpec:
    role: Role
    """A decode engine reads KV blocks; a prefill engine lets others read them."""
    instance: str
    """The worker's instance id, new at each start; it is in KV handles."""
    model: str
    served_model_name: str = ""
    """For the labels of vLLM's own metrics."""
    engine_args: Mapping[str, object] = field(default_factory=dict)
    """vLLM's own arguments in kebab-case."""
    disaggregated: bool = True
    """Whether the engine transfers KV."""
    host: str = "127.0.0.1"
    """Address at which other engines reach this engine."""
    credentials: Credentials | None = None
    """They prove to other engines that this engine belongs to the graph."""
    kv_offload: int = 0
    """Bytes of host memory, for all ranks together, for KV blocks that leave the engine's cache."""
    kv_offload_disk: int = 0
    """Bytes of disk for KV blocks that leave host memory."""
    kv_offload_folder: str = ""
    """Folder on that disk."""
    kv_port: int = 0
    """Port of the KV side channel, the same for all ranks of the engine; 0: a free one."""
    node: EngineNode | None = None
    """None: the engine is on this host only."""


def make_engine(kind: str, spec: EngineSpec) -> Engine:
    engine: Engine = _imported(ENGINES[kind])(spec)
    return engine


def import_ranks(kind: str) -> Callable[[EngineSpec], Ranks]:
    """The class of this host's part of an engine whose core is on another host. The import takes seconds: call it
    before other processes watch this one."""
    ranks: Callable[[EngineSpec], Ranks] = _imported(RANKS[kind])
    return ranks


def _imported(implementation: str) -> Any:
    module, _, name = implementation.partition(":")
    return getattr(import_without_gc(module), name)
