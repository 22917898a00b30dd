"""The records that processes write to the registry (etcd). The rules of `messages.py` apply to them."""

from enum import StrEnum

import msgspec
from msgspec import Struct

from pdserve.contract.messages import safe_decoder


class Role(StrEnum):
    FRONTEND = "frontend"
    DECODE = "decode"
    PREFILL = "prefill"
    BOTH = "both"
    """decode and prefill worker in one process, with one engine"""

    def includes(self, work: "Role") -> bool:
        """Whether a process of this role does the work of role `work`."""
        return self is work or (self is Role.BOTH and work in (Role.DECODE, Role.PREFILL))


WIRE = 2
"""Generation of the wire protocol. Processes of neighbouring generations understand each other
(docs/decisions/0072-neighbours.md); `tests/wire/` says when it rises."""
REFUSED = "refused"
FROM_FILE = "file"
"""Value of `Adapter.asked` for an adapter that the worker's file names."""
MIN_KV_WIRE = 2
"""KV is read only from prefill workers of at least this generation: older ones do not confirm that they kept it."""


def is_compatible(wire: int) -> bool:
    """Whether this build and one of generation `wire` understand each other."""
    return abs(wire - WIRE) <= 1


class Adapter(Struct, frozen=True):
    """A LoRA adapter, as a frontend asks workers to load it and as a worker reports it."""

    name: str
    """the model name in clients' requests"""
    path: str = ""
    """its folder, the same on all hosts; empty: unloaded, although the workers' files name it"""
    id: int = 0
    """id of its weights, which separates the KV computed with them; 0: not known yet"""
    asked: str = FROM_FILE
    """id of the frontend's load call; it tells two loads of the same name apart"""
    problem: str = ""
    """why a worker could not load it"""
    model: str = ""
    """served model name; empty in a worker's record"""


class Instance(Struct, frozen=True):
    """A live process. The record vanishes when the process's lease ends."""

    id: str
    """`<role>-<index>-<boot id>`: a restarted process is a new instance"""
    role: Role
    model: str = ""
    """served model name; empty for a frontend, which serves every model that has a card"""
    address: str = ""
    """of a worker that decodes (also as a stand-in): where its stream listens, `tls://host:port` or `tcp://host:port`;
    of a frontend: its URL"""
    metrics: str = ""
    """URL of its Prometheus page; `/watch` on the same server has its load and links"""
    kv: str = ""
    """host:port of its engine's KV side channel; empty: none"""
    host: str = ""
    pid: int = 0
    gpus: list[int] = []
    kv_blocks: int = 0
    block_size: int = 0
    """tokens in a KV block"""
    kv_tokens: int = 0
    host_tokens: int = 0
    """tokens of KV that fit its host memory tier"""
    disk_tokens: int = 0
    """tokens of KV that fit its disk tier"""
    max_model_len: int = 0
    max_num_seqs: int = 0
    """requests that its engine runs at once; 0: unknown"""
    max_concurrency: float = 0.0
    """requests of max_model_len tokens that fit the KV cache at once"""
    version: str = ""
    """of pdserve; empty in builds before 0.2"""
    wire: int = 1
    """generation of its wire protocol (`WIRE`)"""
    vllm_version: str = ""
    fingerprint: str = ""
    """hash of the model's files and the arguments that change KV; workers share KV only with the same fingerprint"""
    draining: bool = False
    """it finishes its requests and takes no new ones"""
    queue_lost: bool = False
    """it is disconnected from NATS: a prefill worker gets no prompts, a decode worker prefills locally"""
    prefills_remotely: bool = False
    """it is a decode worker that uses prefill workers"""
    stalled: bool = False
    """its engine makes no progress; it gets no new requests until it does"""
    settings: dict[str, str] = {}
    """the live settings that it obeys, with the values in its file (`live_settings.py`)"""
    adapters: list[Adapter] | None = None
    """adapters that its engine has or could not load; None: its engine takes no adapters"""

    def has_adapter(self, adapter: int) -> bool:
        """Whether it serves the adapter of this id; 0: the model itself."""
        return not adapter or any(each.id == adapter for each in self.adapters or ())

    @property
    def is_working(self) -> bool:
        """Of a prefill worker: whether it is connected to NATS, and its engine makes progress."""
        return not (self.queue_lost or self.stalled)

    @property
    def is_stand_in(self) -> bool:
        """Whether it is a prefill worker that decodes while no decode worker is available."""
        return self.role is Role.PREFILL and bool(self.address)


class NodeLeader(Struct, frozen=True):
    """The leader of a worker that spans hosts, registered from before its engine starts until its process ends."""

    id: str
    """the worker's instance id, new at each start, so that followers of an earlier start never join"""
    model: str
    """served model name"""
    nodes: int
    """hosts of the worker, including this one"""
    host: str
    port: int
    """of torch's store, new at each start"""
    vllm_version: str = ""
    engine_args: dict[str, object] = {}
    """the file's vLLM arguments (kebab-case), which must be equal on all hosts"""
    followers: list[str] = []
    """ids of the followers in its engine, by node rank from 1; empty: it waits for them"""


class NodeFollower(Struct, frozen=True):
    """A follower that has joined a leader, registered until its process ends."""

    id: str
    leader: str
    rank: int
    """node rank, from 1"""
    host: str = ""
    stopping: bool = False
    """it was asked to stop, and stops when the leader has drained"""


class SlotState(Struct, frozen=True):
    """State of a process that a supervisor restarts. The record is under the supervisor's lease, so it outlives the
    process. A process that may not register writes one under its own lease (`refused`)."""

    name: str
    """`decode-0`"""
    role: Role
    host: str = ""
    state: str = "starting"
    """`starting`, `ready`, `draining`, `waiting to restart` or `stopped`; `refused`: it waits because of
    incompatible processes (`process/presence.py`)"""
    restarts: int = 0
    """since the supervisor started"""
    failed_starts: int = 0
    """since it was last ready"""
    end: str = ""
    """its last exit, as `exit code 1`; empty: it never exited"""
    cause: str = ""
    """its last error or line of output before that exit"""
    since: float = 0.0
    """Unix seconds of its last change from or to ready, for display; 0: unknown"""
    model: str = ""
    """of a worker; empty for a frontend"""

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def __str__(self) -> str:
        """Leave out the cause, which may hold private data."""
        parts = [self.state]
        if self.failed_starts:
            parts.append(f"failed to start {self.failed_starts} times")
        if self.end:
            parts.append(f"last end: {self.end}")
        return ", ".join(parts)


class ModelCard(Struct, frozen=True):
    """What a frontend needs to serve a model. Each worker that may decode writes its own card, under its lease."""

    name: str
    """the served model name"""
    model: str
    """path or hub id, as the worker loaded it"""
    engine_args: dict[str, object] = {}
    """vLLM arguments (kebab-case) for tokenizing, templates, parsers and limits"""
    max_model_len: int = 0
    vllm_version: str = ""
    blob: str = ""
    """digest of the worker's archive of config, tokenizer and chat template; empty: `model` is a hub id"""
    supported_tasks: list[str] = msgspec.field(default_factory=lambda: ["generate"])
    created: int = 0
    """Unix seconds, for display"""
    fingerprint: str = ""
    """`Instance.fingerprint` of the worker"""
    generation: int = 0
    """incremented with each change of the model under this name"""

    def is_interchangeable(self, other: "ModelCard") -> bool:
        """Whether a frontend that serves this card also serves the other."""
        return msgspec.structs.replace(self, created=other.created, generation=other.generation) == other


encode_record = msgspec.json.Encoder().encode
"""Registry values are JSON, so that people can read the output of `etcdctl get --prefix`."""
decode_adapter = safe_decoder(msgspec.json.Decoder(Adapter).decode)
decode_instance = safe_decoder(msgspec.json.Decoder(Instance).decode)
decode_card = safe_decoder(msgspec.json.Decoder(ModelCard).decode)
decode_leader = safe_decoder(msgspec.json.Decoder(NodeLeader).decode)
decode_follower = safe_decoder(msgspec.json.Decoder(NodeFollower).decode)
decode_slot_state = safe_decoder(msgspec.json.Decoder(SlotState).decode)
