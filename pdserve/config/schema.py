"""The schema of a configuration file, section by section, and `Config`, which is read from it.

Frozen dataclasses. The type of a key is its rule: pydantic checks it when a section is read (`sections.py`), and error
texts and `docs/configuration.md` are made from it. A key's text is below it: before `;` a number's unit, at the end
what holds where the key is not set.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from pdserve.config.addresses import each, etcd_address, nats_url, own_address, traces_url
from pdserve.config.engine_args.installed import expand_home
from pdserve.contract.live_settings import PrefillPolicy, RouterPolicy
from pdserve.contract.slo import DURATION, NO_SLO, SloTargets, parse_duration
from pdserve.util.net import url_host

WorkerRole = Literal["decode", "both"]
Allowance = Literal["no-keys", "plain-http", "plain-graph"]
EngineKind = Literal["vllm", "sim"]
ENGINES: tuple[str, ...] = get_args(EngineKind)


def kebab(name: str) -> str:
    return name.replace("_", "-")


def _host(host: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?|[0-9a-fA-F:]*:[0-9a-fA-F:.]*", host) is None:
        text = "must be a host name or IP address without scheme or port, as in 10.0.0.5."
        raise ValueError(f"is {host!r}, but {text}")
    return host


def _namespace(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]+", name) is None:
        text = "may have letters, digits, - and _ only: it becomes part of NATS subjects."
        raise ValueError(f"is {name!r}, but {text}")
    return name


def _text(value: object) -> object:
    """Not blank. (An error that is no ValueError is reported as "is …, but must be …", by the key's type.)"""
    if not isinstance(value, str) or not value.strip():
        raise PydanticCustomError("text", "not a text")
    return value


def _gpu_count(value: object) -> object:
    """May be a text, as in Dynamo's files. A key without a value is an error, unlike no key. A share is of one GPU."""
    if value is None:
        raise PydanticCustomError("number", "not a number")
    if share_of_gpu(value) < 1:
        return 1
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def share_of_gpu(value: object) -> float:
    """The share that a worker has of each of its GPUs: less than 1 where `gpu` is a fraction."""
    return value if isinstance(value, float) and 0 < value < 1 else 1.0


def _size(value: object) -> object:
    if value == 0 and not isinstance(value, bool):
        return 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MGT])iB", value.strip()) if isinstance(value, str) else None
    if match is None:
        raise PydanticCustomError("size", "not a size")
    return int(float(match[1]) * 2 ** {"M": 20, "G": 30, "T": 40}[match[2]])


def _duration(value: object) -> object:
    try:
        return parse_duration(value) if isinstance(value, str) else parse_duration("")
    except ValueError:
        raise PydanticCustomError("duration", "not a duration") from None


def _origin(origin: str) -> str:
    if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@*]+", origin) is None:
        raise ValueError(f"has {origin!r}, but an origin has a scheme and no path: https://chat.example.com.")
    return origin


def _absolute(path: Path, info: ValidationInfo) -> Path:
    """A relative path counts from the file's folder, which is the context."""
    return Path(info.context or "", expand_home(path)).resolve()


Text = Annotated[str, BeforeValidator(_text)]
Host = Annotated[Text, AfterValidator(_host)]
NatsServers = Annotated[
    str | None,
    BeforeValidator(each(nats_url)),
    Field(json_schema_extra={"is": "a URL as in nats://10.0.0.5:4222, or a list of URLs"}),
]
TracesUrl = Annotated[str, AfterValidator(traces_url)]
EtcdMembers = Annotated[
    str | None,
    BeforeValidator(each(etcd_address)),
    Field(json_schema_extra={"is": "an address as in 10.0.0.5:2379, or a list of addresses"}),
]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
Zero = Annotated[int, Field(strict=True, ge=0, le=0)]
ZeroOrMore = Annotated[int, Field(strict=True, ge=0)]
OneOrMore = Annotated[int, Field(strict=True, ge=1)]
Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Duration = Annotated[float | None, BeforeValidator(_duration), Field(json_schema_extra={"is": DURATION})]
Size = Annotated[int, BeforeValidator(_size), Field(json_schema_extra={"is": "a size as in 32GiB"})]
Flag = Annotated[bool, Field(strict=True)]
CommonKeys = Annotated[
    tuple[Text, ...], Field(json_schema_extra={"is": "a list of keys of Common, as in [model, block-size]"})
]
Allowances = Annotated[
    tuple[Allowance, ...],
    Field(json_schema_extra={"is": f"a list of {', '.join(get_args(Allowance))}"}),
]
Origins = Annotated[
    tuple[Annotated[Text, AfterValidator(_origin)], ...],
    Field(json_schema_extra={"is": "a list of origins, as in [https://chat.example.com]"}),
]
GpuNumbers = Annotated[
    tuple[ZeroOrMore, ...], Field(json_schema_extra={"is": "a list of GPU numbers, as in [0, 1]"})
]
File = Annotated[Path, BeforeValidator(_text), AfterValidator(_absolute)]
GpuCount = Annotated[
    ZeroOrMore | None,
    BeforeValidator(_gpu_count),
    Field(json_schema_extra={"is": "a whole number, 0 or more, or a share of one GPU such as 0.5"}),
]


class Section:
    """Keys are in kebab-case. A key inside of a mapping has the mapping's name before it: `ServiceArgs.workers`."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", alias_generator=kebab)
    takes_arguments: ClassVar[bool] = False
    """whether vLLM's arguments may stand beside the section's own keys"""


@dataclass(frozen=True)
class AdmissionLimits(Section):
    """For each model and frontend process: which requests wait while the decode workers are full."""

    max_wait: Seconds = 30.0
    """seconds; a request that would wait longer is refused at once"""
    max_waiting: OneOrMore = 1024
    """requests; more waiting ones are refused"""
    max_waiting_tokens: OneOrMore = 1_000_000
    """tokens; about, of the waiting prompts and their outputs; more are refused"""
    max_outputs: OneOrMore = 128
    """outputs; of one request: n times its prompts"""


@dataclass(frozen=True)
class FrontendProcesses(Section):
    """Keys of both Frontend and Processor, which are one process."""

    processes: Annotated[OneOrMore, Field(validation_alias="ServiceArgs.workers")] = 1
    """frontend processes, which share the port: the larger of Frontend's and Processor's ServiceArgs.workers"""
    gpu: Annotated[Zero, Field(validation_alias="ServiceArgs.resources.gpu")] = 0
    """a frontend needs none; accepted because Dynamo's files set it"""


@dataclass(frozen=True)
class RouterChoice(Section):
    router: RouterPolicy = "round-robin"
    """how a decode worker is chosen: in turn; by outstanding tokens relative to its KV cache; or by those and the
    prompt's prefix hit there"""


@dataclass(frozen=True)
class ProcessorSection(RouterChoice, FrontendProcesses):
    takes_arguments: ClassVar[bool] = True
    common_configs: CommonKeys = ()
    """keys of `Common` that apply to this section unless it sets them itself"""


@dataclass(frozen=True)
class HttpServer(AdmissionLimits, FrontendProcesses):
    host: Host = "127.0.0.1"
    """address that clients connect to; 0.0.0.0: from other machines too"""
    port: Port = 8000
    """port of the OpenAI API"""
    header_timeout: Seconds = 30.0
    """seconds; for a complete request head, else the connection is closed"""
    write_timeout: Seconds = 30.0
    """seconds; a request whose client reads nothing for so long is ended"""
    max_connections: OneOrMore = 8192
    """connections; open at a time at each frontend process, at most its file descriptors less 256; more are closed"""
    allowed_origins: Origins = ()
    """web pages that may use the API from a browser; ["*"]: all; not set: all if requests need an API key, else those
    of this machine"""
    max_request_timeout: Seconds = 3600.0
    """seconds; the longest deadline that a client may ask for"""
    batches: File | None = None
    """folder for [batches](frontend.md#batches), the same for all frontends; not set: no batches"""


@dataclass(frozen=True)
class FrontendSection(HttpServer):
    served_model_name: Text = ""
    """the name that clients put into `model`; not set: the model's own name"""


@dataclass(frozen=True)
class FrontendConfig(HttpServer, RouterChoice):
    """The keys of Frontend and Processor that a frontend process needs."""


@dataclass(frozen=True)
class WorkerSection(Section):
    """Keys of both decode and prefill workers."""

    takes_arguments: ClassVar[bool] = True
    common_configs: CommonKeys = ()
    """keys of `Common` that apply to this section unless it sets them itself"""
    engine: EngineKind = "vllm"
    """the real engine, or a simulated one"""
    count: Annotated[OneOrMore, Field(validation_alias="ServiceArgs.workers")] = 1
    """workers, each with its own engine"""
    gpus: Annotated[GpuCount, Field(validation_alias="ServiceArgs.resources.gpu")] = None
    """GPUs; per worker; 0.5: half of one, which two workers share; 0: on the CPU; not set: one for each rank of the
    engine if the machine has GPUs, else 0"""
    gpu_ids: Annotated[GpuNumbers, Field(validation_alias="ServiceArgs.resources.gpu-ids")] = ()
    """exactly these GPUs: those of the first worker's ranks, then of the second's, and so on; workers may share a GPU;
    not set: the placement chooses"""

    kv_offload: Size = 0
    """host memory of each worker for KV that leaves its cache: prompts that begin with it load it from there
    ([memory.md](memory.md#kv-in-host-memory)); not set: none"""
    kv_offload_disk: Size = 0
    """disk of each worker for what leaves that host memory ([memory.md](memory.md#kv-on-disk)); not set: none"""
    kv_offload_folder: File | None = None
    """where on the disk; a relative path counts from the file's folder; not set: the state directory"""


@dataclass(frozen=True)
class DecodeSection(WorkerSection):
    role: WorkerRole = "decode"
    """`both`: these workers also prefill, for each other and for themselves, when they have time"""
    remote_prefill: Flag = False
    """prefill long prompts on prefill workers, or on workers of role `both`"""
    conditional_disagg: Flag = True
    """false: every prompt is prefilled remotely, as long as there is a prefill worker"""
    policy: PrefillPolicy | None = None
    """decides between local and remote prefill: `threshold`, by the two keys below; `adaptive`, the cheaper way by
    measured speeds; not set: `adaptive`, unless a threshold is set"""
    max_local_prefill_length: ZeroOrMore = 512
    """tokens; a prompt with more tokens to compute goes to a prefill worker"""
    max_prefill_queue_size: ZeroOrMore = 10
    """requests; with this many waiting in the prefill queue, a prompt is prefilled locally"""


@dataclass(frozen=True)
class PrefillSection(WorkerSection):
    stand_in: Flag = True
    """while there is no decode worker, prefill workers decode"""


@dataclass(frozen=True)
class WorkerConfig(WorkerSection):
    engine_args: Mapping[str, object] = field(default_factory=dict)
    """vLLM's arguments in kebab-case, of the section and of Common, checked against vLLM's argument list; without those
    that the graph sets itself"""
    origins: Mapping[str, str] = field(default_factory=dict)
    """the origin of each of `engine_args`: `Common`, the section's name, or `pdserve (reason)`"""
    share: float = 1.0
    """of its GPU; the rest is for others"""

    @property
    def ranks(self) -> int:
        """Processes of an engine, each with a share of the model: tensor x pipeline x prefill-context parallel."""
        names = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")
        return math.prod(int(str(self.engine_args.get(name, 1))) for name in names)

    @property
    def nodes(self) -> int:
        """Hosts of an engine, each with as many of its ranks."""
        return int(str(self.engine_args.get("nnodes", 1)))

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes


@dataclass(frozen=True)
class DecodeConfig(WorkerConfig, DecodeSection):
    pass


@dataclass(frozen=True)
class PrefillConfig(WorkerConfig, PrefillSection):
    pass


@dataclass(frozen=True, kw_only=True)
class GraphSection(Section):
    namespace: Annotated[Text, AfterValidator(_namespace)] = "pdserve"
    """separates the graphs that share an etcd and NATS"""
    nats: NatsServers = None
    """the NATS server, or all servers of one cluster; not set: `serve` starts its own"""
    etcd: EtcdMembers = None
    """the etcd server, or all members of one cluster; not set: `serve` starts its own"""
    queue_replicas: Annotated[int | None, Field(strict=True, ge=1, le=5)] = None
    """servers; how many of a NATS cluster keep the prefill queue; not set: 3 if `nats` names three or more"""
    host: Annotated[Host, AfterValidator(own_address)] = "127.0.0.1"
    """address at which other machines reach this machine's workers, whose engines listen on its network device only
    (and on RDMA ports)"""
    kv_port: Port = 5600
    """first of the workers' NIXL side-channel ports, one for each worker, where others ask how to read its KV"""
    stream_port: Port | None = None
    """first of the ports at which workers take requests from frontends, to which a role that runs alone adds its
    `--index`; not set: free ones"""
    pages_port: Port | None = None
    """the same for the pages of each process (`/metrics`, `/live`, `/ready`); not set: free ones"""
    state_dir: File = Path("~/.pdserve")
    """folder for the data of embedded servers; a relative path counts from the file's folder"""
    request_timeout: Seconds = 600.0
    """seconds; the deadline of a request that sets none"""
    drain_timeout: SecondsOrZero = 30.0
    """seconds; for running requests to finish after SIGTERM"""
    otlp_endpoint: Annotated[TracesUrl | None, BeforeValidator(_text)] = None
    """OpenTelemetry collector for [traces](traces.md), as in http://127.0.0.1:4318; not set: no traces"""


@dataclass(frozen=True)
class SloSection(Section):
    """The promise of the model. Of several files with workers of one model, the tightest counts."""

    ttft: Duration = None
    """from a request's arrival to its first token; not set: not promised"""
    gap: Duration = None
    """the longest between two tokens of an answer; not set: not promised"""


@dataclass(frozen=True, kw_only=True)
class SecuritySection(Section):
    """Relative paths count from the YAML's folder."""

    credentials: File | None = None
    """folder made by `pdserve credentials`, the same on all hosts: NATS, etcd and streams are encrypted and accept only
    its certificates; not set: `serve` makes one for this run if it starts both servers, else none"""
    api_keys: File | None = None
    """file of [API keys](frontend.md#api-keys) with names and limits; keys of PDSERVE_API_KEYS are accepted too"""
    tls_certificate: File | None = None
    """certificate of the OpenAI API with its chain, in PEM; clients then connect by https"""
    tls_key: File | None = None
    """private key of `tls-certificate`, in PEM"""
    allow: Allowances = ()
    """what other machines may reach unprotected: `no-keys`, an API without keys; `plain-http`, an API without TLS, as
    behind a proxy; `plain-graph`, NATS, etcd and streams without credentials"""


@dataclass(frozen=True)
class Config(GraphSection):
    path: Path
    """the YAML file, for messages"""
    model: str
    """absolute path of a model folder, or a hub id; `demo` was resolved to the bundled model's folder"""
    served_model_name: str
    """the name that clients put into `model`"""
    frontend: FrontendConfig | None
    decode: DecodeConfig | None
    prefill: PrefillConfig | None
    security: SecuritySection = field(default_factory=SecuritySection)
    """with absolute paths"""
    slo: SloTargets = NO_SLO
    """what is promised to the clients of the model"""
    from_environment: tuple[str, ...] = ()
    """the variables that won over the file, with their keys"""
    notes: tuple[str, ...] = ()
    """keys with another meaning here than in Dynamo, one sentence each, to be shown once at start"""

    @property
    def spans_hosts(self) -> bool:
        return any(worker is not None and worker.nodes > 1 for worker in (self.decode, self.prefill))

    @property
    def scheme(self) -> str:
        return "https" if self.security.tls_certificate else "http"

    @property
    def url(self) -> str:
        """Of the frontends of this machine; empty where it has none."""
        if self.frontend is None:
            return ""
        return f"{self.scheme}://{url_host(self.frontend.host, '127.0.0.1')}:{self.frontend.port}"
