"""The records that processes write to the registry (etcd). The rules of `messages.py` hold for them, too."""

from enum import StrEnum

import msgspec
from msgspec import Struct

from pdserve.contract.messages import safe_decoder


class Role(StrEnum):
    FRONTEND = "frontend"
    DECODE = "decode"
    PREFILL = "prefill"
    BOTH = "both"
    """decode and prefill worker in one process, on one engine"""

    def includes(self, work: "Role") -> bool:
        """Whether a process of this role does the work of that one."""
        return self is work or (self is Role.BOTH and work in (Role.DECODE, Role.PREFILL))


WIRE = 2
"""Generation of all that processes say to each other. Those of neighbouring generations understand each other
(docs/decisions/0072-neighbours.md); `tests/wire/` says when it rises."""
REFUSED = "refused"
FROM_FILE = "file"
"""in the place of a call: the worker's own file names the adapter"""
MIN_KV_WIRE = 2
"""generation from which on prefill workers confirm that they held KV until it was read; of others none is read"""


def is_compatible(wire: int) -> bool:
    """Whether this build and one of that generation understand each other."""
    return abs(wire - WIRE) <= 1


class Adapter(Struct, frozen=True):
    """A LoRA adapter of a model: as a frontend asks its workers for it, and as a worker has it."""

    name: str
    """by which clients ask for it"""
    path: str = ""
    """its folder, the same on all hosts; empty: unloaded, though the workers' files name it"""
    id: int = 0
    """of its weights: whatever is computed with them is kept apart by it; 0: not known yet"""
    asked: str = FROM_FILE
    """by which of a frontend's calls it is there, since a name may be unloaded and loaded again"""
    problem: str = ""
    """why a worker could not load it"""
    model: str = ""
    """served model name; left out in a worker's record"""


class Instance(Struct, frozen=True):
    """A live process. It exists in the registry exactly as long as its lease."""

    id: str
    """`<role>-<index>-<boot id>`: a restarted process is a new instance"""
    role: Role
    model: str = ""
    """served model name; empty for a frontend, which serves every model that has a card"""
    address: str = ""
    """where its stream listens, `tls://host:port` or `tcp://host:port` (workers that decode, if only as stand-ins), or
    its URL (frontend)"""
    metrics: str = ""
    """URL of its Prometheus page; `/watch` beside it has its load and links"""
    kv: str = ""
    """host:port of its engine's side channel, where others ask how to read its KV; empty: there is none"""
    host: str = ""
    pid: int = 0
    gpus: list[int] = []
    kv_blocks: int = 0
    block_size: int = 0
    """tokens in a KV block"""
    kv_tokens: int = 0
    host_tokens: int = 0
    """for whose KV it has host memory beside its cache"""
    disk_tokens: int = 0
    """for whose KV it has room on disk below that"""
    max_model_len: int = 0
    max_num_seqs: int = 0
    """requests that its engine runs at once; 0: unknown"""
    max_concurrency: float = 0.0
    """number of requests of max_model_len tokens that fit the KV cache at once"""
    version: str = ""
    """of pdserve; empty in builds before 0.2"""
    wire: int = 1
    """generation of its messages (`WIRE`)"""
    vllm_version: str = ""
    fingerprint: str = ""
    """of the model's files and of the arguments that change KV; workers share KV only with the same fingerprint"""
    draining: bool = False
    """true: the process finishes its requests and takes no new ones"""
    queue_lost: bool = False
    """true: the worker has lost NATS. A prefill worker then takes no prompts and its answers arrive nowhere; a decode
    worker prefills locally"""
    prefills_remotely: bool = False
    """true: the decode worker has use for prefill workers"""
    stalled: bool = False
    """true: the worker's engine neither answers nor computes; it gets no new work until it does"""
    settings: dict[str, str] = {}
    """what its file says of the live settings that it goes by (`live_settings.py`)"""
    adapters: list[Adapter] | None = None
    """those in its engine, and those that it could not load; None: its engine takes none"""

    def has_adapter(self, adapter: int) -> bool:
        """Whether requests for the adapter of this id may be sent to it; 0 stands for the model itself."""
        return not adapter or any(each.id == adapter for each in self.adapters or ())

    @property
    def is_working(self) -> bool:
        """Whether a prefill worker takes prompts and answers, unless it drains."""
        return not (self.queue_lost or self.stalled)

    @property
    def is_stand_in(self) -> bool:
        """Whether it is a prefill worker that decodes where no decode worker is there."""
        return self.role is Role.PREFILL and bool(self.address)


class NodeLeader(Struct, frozen=True):
    """The leader of a worker that spans hosts, from before its engine starts until its process is gone."""

    id: str
    """the worker's instance id: hosts of different boots of the leader never meet"""
    model: str
    """served model name"""
    nodes: int
    """hosts of the worker, this one included"""
    host: str
    port: int
    """for torch's store, of this boot alone"""
    vllm_version: str = ""
    engine_args: dict[str, object] = {}
    """the file's arguments for vLLM (kebab-case), which must be the same on all hosts"""
    followers: list[str] = []
    """ids of the followers with which its engine runs, by node rank from 1 on; empty: it waits for them"""


class NodeFollower(Struct, frozen=True):
    """A follower that has joined a leader, from then until its process is gone."""

    id: str
    leader: str
    rank: int
    """its node rank, from 1 on"""
    host: str = ""
    stopping: bool = False
    """true: it was asked to stop, and does so when the leader has drained"""


class SlotState(Struct, frozen=True):
    """A process that a supervisor keeps alive, as the supervisor sees it; under the supervisor's lease, so that it
    remains while the process itself is down."""

    name: str
    """`decode-0`"""
    role: Role
    host: str = ""
    state: str = "starting"
    """`starting`, `ready`, `draining`, `waiting to restart` or `stopped`; `refused`, as a process says itself that may
    not register (`process/presence.py`)"""
    restarts: int = 0
    """number of restarts since the supervisor started"""
    failed_starts: int = 0
    """number of failed starts since it was last ready"""
    end: str = ""
    """how it last ended, `exit code 1`; empty: it never did"""
    cause: str = ""
    """its last error or line of output before that"""
    since: float = 0.0
    """Unix seconds at which it became ready or ceased to be, for display; 0: unknown"""
    model: str = ""
    """of a worker; empty for a frontend"""

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def __str__(self) -> str:
        """Leave out the cause, which may hold what should not be public."""
        parts = [self.state]
        if self.failed_starts:
            parts.append(f"failed to start {self.failed_starts} times")
        if self.end:
            parts.append(f"last end: {self.end}")
        return ", ".join(parts)


class ModelCard(Struct, frozen=True):
    """What a frontend needs to serve a model; each decode worker writes a card under its own lease."""

    name: str
    """the served model name"""
    model: str
    """path or hub id, as the worker loaded it"""
    engine_args: dict[str, object] = {}
    """the vLLM arguments (kebab-case) on which tokenizing, templates, parsers and limits depend"""
    max_model_len: int = 0
    vllm_version: str = ""
    blob: str = ""
    """digest of the worker's archive with config, tokenizer and chat template; empty: a hub id"""
    supported_tasks: list[str] = msgspec.field(default_factory=lambda: ["generate"])
    created: int = 0
    """Unix seconds, for display"""
    fingerprint: str = ""
    """as in the worker's Instance"""
    generation: int = 0
    """incremented with each change of what is served under this name: the highest is the newest, whatever the workers'
    clocks say"""

    def is_interchangeable(self, other: "ModelCard") -> bool:
        """Return whether a frontend that serves this card also serves the other."""
        return msgspec.structs.replace(self, created=other.created, generation=other.generation) == other


encode_record = msgspec.json.Encoder().encode
"""registry values are JSON, so that `etcdctl get --prefix` can be read"""
decode_adapter = safe_decoder(msgspec.json.Decoder(Adapter).decode)
decode_instance = safe_decoder(msgspec.json.Decoder(Instance).decode)
decode_card = safe_decoder(msgspec.json.Decoder(ModelCard).decode)
decode_leader = safe_decoder(msgspec.json.Decoder(NodeLeader).decode)
decode_follower = safe_decoder(msgspec.json.Decoder(NodeFollower).decode)
decode_slot_state = safe_decoder(msgspec.json.Decoder(SlotState).decode)
