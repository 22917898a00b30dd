"""What an engine is started with, and which implementation is used."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.credentials import Credentials
from pdserve.engine.base import Engine
from pdserve.imports import import_large
from pdserve.records import Role

ENGINES = {"vllm": "pdserve.engine.vllm.engine:VllmEngine", "sim": "pdserve.engine.sim.engine:SimEngine"}
"""by the `engine` key of a worker's section; import strings, so that only the chosen module is loaded"""


@dataclass(frozen=True)
class EngineSpec:
    role: Role
    """a decode engine reads KV blocks, a prefill engine hands them out"""
    instance: str
    """the worker's instance id, unique for each boot; KV handles carry it"""
    model: str
    served_model_name: str = ""
    """for the labels of vLLM's own metrics"""
    engine_args: Mapping[str, object] = field(default_factory=dict)
    """vLLM's own arguments in kebab-case"""
    disaggregated: bool = True
    """false: a decode engine that never reads KV, without a KV connector"""
    host: str = "127.0.0.1"
    """address at which other engines reach this engine"""
    credentials: Credentials | None = None
    """that prove to other engines that this engine is of the graph"""
    kv_port: int = 0
    """port of the KV side channel, one for all ranks of the engine; 0: a free one"""


def make_engine(kind: str, spec: EngineSpec) -> Engine:
    module, name = ENGINES[kind].split(":")
    engine: Engine = getattr(import_large(module), name)(spec)
    return engine
