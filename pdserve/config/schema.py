"""The loaded configuration: frozen, complete, with every default filled in. `load.py` makes it from YAML."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

POLICIES = ("round-robin", "least-loaded")
"""how a decode worker is chosen for a request: see `frontend/model/router.py`"""
ENGINES = ("vllm", "sim")
"""see `engine/spec.py`"""


@dataclass(frozen=True)
class AdmissionLimits:
    """Of each model and frontend process: who waits while the decode workers are full."""

    max_wait: float = 30.0
    """seconds; a request whose turn would come later is refused at once"""
    max_waiting: int = 1024
    """requests; more are refused"""
    max_waiting_tokens: int = 1_000_000
    """tokens; about, of the prompts that wait and what they will generate"""
    max_outputs: int = 128
    """outputs; of one request: n, times its prompts"""


@dataclass(frozen=True)
class FrontendConfig:
    host: str = "127.0.0.1"
    """address that clients connect to; 0.0.0.0: from other machines too"""
    port: int = 8000
    """of the OpenAI API"""
    processes: int = 1
    """processes; how many frontends share the port: the larger of Frontend's and Processor's ServiceArgs.workers"""
    router: str = "round-robin"
    """how a decode worker is chosen for a request"""
    limits: AdmissionLimits = AdmissionLimits()
    header_timeout: float = 30.0
    """seconds; a connection on which no whole request head comes within them is closed"""
    write_timeout: float = 30.0
    """seconds; a request whose client takes nothing of its answer for so long ends"""
    max_request_timeout: float = 3600.0
    """seconds; a client may not ask for a later deadline"""


@dataclass(frozen=True)
class WorkerConfig:
    """What decode and prefill workers have in common. `engine_args` are vLLM's own arguments in kebab-case,
    with the common-configs merged in, checked against vLLM's argument list; those that the graph sets itself
    are not in it."""

    count: int = 1
    """workers; each is an engine of its own"""
    gpus: int | None = None
    """GPUs; per worker; 0: on the CPU; not set: as many as the engine has ranks where the machine has GPUs, else 0"""
    gpu_ids: tuple[int, ...] = ()
    """exactly these GPUs, as many as it has ranks for each worker in turn; workers may share one; empty: the placement
    chooses"""
    engine: str = "vllm"
    """the real engine, or a simulated one"""
    engine_args: Mapping[str, object] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    """where each of `engine_args` came from: `Common`, the section's name, or `pdserve, …`"""

    @property
    def ranks(self) -> int:
        """Processes of one engine that each hold a share of the model: tensor x pipeline x prefill-context
        parallel."""
        names = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")
        return math.prod(int(str(self.engine_args.get(name, 1))) for name in names)


@dataclass(frozen=True)
class DecodeConfig(WorkerConfig):
    remote_prefill: bool = False
    """prefill long prompts on prefill workers"""
    conditional_disagg: bool = True
    """false: every prompt is prefilled remotely whatever its length, as long as a prefill worker lives"""
    max_local_prefill_length: int = 512
    """tokens; a prompt with more than these to compute goes to a prefill worker"""
    max_prefill_queue_size: int = 10
    """requests; with these many waiting, prefill locally"""


@dataclass(frozen=True)
class PrefillConfig(WorkerConfig):
    pass


@dataclass(frozen=True)
class Config:
    path: Path
    """the YAML file, for messages"""
    model: str
    """path of a model folder (absolute) or a hub id; `demo` was resolved to the bundled model's folder"""
    served_model_name: str
    """what clients put into `model`; not set: the model's own name"""
    frontend: FrontendConfig | None
    decode: DecodeConfig | None
    prefill: PrefillConfig | None
    namespace: str = "pdserve"
    """separates several graphs on one etcd and NATS"""
    nats: str | None = None
    """URL; not set: `serve` starts its own"""
    etcd: str | None = None
    """host:port; not set: `serve` starts its own"""
    host: str = "127.0.0.1"
    """address under which the workers of this machine are reached by the others; all parts of their engines listen on
    its network device only (and on RDMA ports)"""
    kv_port: int = 5600
    """first of the ports on which workers hand out their KV handles (NIXL side channel), one for each
    worker"""
    state_dir: Path = Path("~/.pdserve")
    """where embedded servers keep their data; a relative folder counts from the file's"""
    request_timeout: float = 600.0
    """seconds; the deadline of a request that names none"""
    drain_timeout: float = 30.0
    """seconds; for running requests to finish after SIGTERM"""
    notes: tuple[str, ...] = ()
    """what was read differently from how it was written, one sentence each, to be shown once at start"""
