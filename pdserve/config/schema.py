"""The schema of a configuration file, section by section, and `Config`, the loaded file.

Frozen dataclasses. The type of a key is its rule: pydantic checks it when a section is read (`sections.py`), and error
texts and `docs/configuration.md` are made from it. The text below a key is its documentation: a unit, if it has one,
the meaning, and what happens if it is `not set:`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from pdserve.config.addresses import each_address, etcd_address, nats_url, own_address, traces_url
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
    """Refuse a blank text, or another type. (`PydanticCustomError` is reported as "is …, but must be …".)"""
    if not isinstance(value, str) or not value.strip():
        raise PydanticCustomError("text", "not a text")
    return value


def _gpu_count(value: object) -> object:
    """Accept a text too, as in Dynamo's files; a share counts as one GPU."""
    if value is None:
        raise PydanticCustomError("number", "not a number")
    if share_of_gpu(value) < 1:
        return 1
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def share_of_gpu(value: object) -> float:
    """Return a worker's share of its GPU: less than 1 if `gpu` is a fraction."""
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
    """Resolve a path. A relative one counts from the file's folder, which `info.context` has."""
    return Path(info.context or "", expand_home(path)).resolve()


Text = Annotated[str, BeforeValidator(_text)]
Host = Annotated[Text, AfterValidator(_host)]
NatsServers = Annotated[
    str | None,
    BeforeValidator(each_address(nats_url)),
    Field(json_schema_extra={"is": "a URL as in nats://10.0.0.5:4222, or a list of URLs"}),
]
TracesUrl = Annotated[str, AfterValidator(traces_url)]
EtcdMembers = Annotated[
    str | None,
    BeforeValidator(each_address(etcd_address)),
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
    """Keys are in kebab-case. A key in a mapping has the mapping's name before it: `ServiceArgs.workers`."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", alias_generator=kebab)
    takes_arguments: ClassVar[bool] = False
    """whether the section may have vLLM's arguments beside its own keys"""


@dataclass(frozen=True)
class AdmissionLimits(Section):
    """Limits on requests that wait while the decode workers are full, for each model and frontend process."""

    max_wait: Seconds = 30.0
    """seconds; a request that would wait longer is refused at once"""
    max_waiting: OneOrMore = 1024
    """requests; a request is refused while this many wait"""
    max_waiting_tokens: OneOrMore = 1_000_000
    """tokens; a request is refused while the waiting prompts and their outputs have about this many"""
    max_outputs: OneOrMore = 128
    """outputs; maximum of one request, which has `n` for each prompt"""


@dataclass(frozen=True)
class FrontendProcesses(Section):
    """Keys of both Frontend and Processor, which are one process."""

    processes: Annotated[OneOrMore, Field(validation_alias="ServiceArgs.workers")] = 1
    """frontend processes, which share the port: the larger of Frontend's and Processor's counts"""
    gpu: Annotated[Zero, Field(validation_alias="ServiceArgs.resources.gpu")] = 0
    """accepted because Dynamo's files set it"""


@dataclass(frozen=True)
class RouterChoice(Section):
    router: RouterPolicy = "round-robin"
    """[how](frontend.md#models) a decode worker is chosen"""


@dataclass(frozen=True)
class ProcessorSection(RouterChoice, FrontendProcesses):
    takes_arguments: ClassVar[bool] = True
    common_configs: CommonKeys = ()
    """keys of `Common` that apply to this section unless it sets them itself"""


@dataclass(frozen=True)
class HttpServer(AdmissionLimits, FrontendProcesses):
    host: Host = "127.0.0.1"
    """address that clients connect to; 0.0.0.0: also from other machines"""
    port: Port = 8000
    """port of the OpenAI API"""
    header_timeout: Seconds = 30.0
    """seconds; a connection that sends no complete request head in this time is closed"""
    write_timeout: Seconds = 30.0
    """seconds; a request is ended if its client reads nothing for this long"""
    max_connections: OneOrMore = 8192
    """connections; maximum of a frontend process, or its file descriptors less 256 if that is lower; more are closed"""
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
    """the GPUs of the first worker's ranks, then the second's, ...; workers may share one; not set: pdserve chooses"""

    kv_offload: Size = 0
    """[host memory](memory.md#kv-in-host-memory) of each worker for KV that leaves its cache; not set: none"""
    kv_offload_disk: Size = 0
    """[disk](memory.md#kv-on-disk) of each worker for KV that leaves host memory; not set: none"""
    kv_offload_folder: File | None = None
    """folder for KV on disk; a relative path counts from the file's folder; not set: the state directory"""


@dataclass(frozen=True)
class DecodeSection(WorkerSection):
    role: WorkerRole = "decode"
    """`both`: these workers also prefill for each other while they have capacity"""
    remote_prefill: Flag = False
    """prefill long prompts on prefill workers, or on workers of role `both`"""
    conditional_disagg: Flag = True
    """false: prefill every prompt remotely while there is a prefill worker"""
    policy: PrefillPolicy | None = None
    """chooses local or remote prefill: `threshold`, by the two keys below; `adaptive`, the cheaper one by measured
    speeds; not set: `adaptive`, unless a threshold is set"""
    max_local_prefill_length: ZeroOrMore = 512
    """tokens; a prompt with more tokens to compute goes to a prefill worker"""
    max_prefill_queue_size: ZeroOrMore = 10
    """requests; while this many wait in the prefill queue, prompts are prefilled locally"""
    prefill_by_prefix: Flag = True
    """send a prompt to the prefill worker that has its prefix cached, if that saves time; false: to any"""


@dataclass(frozen=True)
class PrefillSection(WorkerSection):
    stand_in: Flag = True
    """prefill workers also decode while no decode worker is available"""


@dataclass(frozen=True)
class WorkerConfig(WorkerSection):
    engine_args: Mapping[str, object] = field(default_factory=dict)
    """checked vLLM arguments in kebab-case: from the section, from Common, and defaults that the plan adds"""
    origins: Mapping[str, str] = field(default_factory=dict)
    """where each of `engine_args` comes from: `Common`, the section's name, or `pdserve (reason)`"""
    share: float = 1.0
    """of its GPU; other workers may use the rest"""

    @property
    def ranks(self) -> int:
        """Processes of an engine: tensor x pipeline x prefill-context parallel."""
        names = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")
        return math.prod(int(str(self.engine_args.get(name, 1))) for name in names)

    @property
    def nodes(self) -> int:
        """Hosts of an engine, each with the same number of its ranks."""
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
    """servers of a NATS cluster that keep a copy of the prefill queue; not set: 3 if `nats` names three or more"""
    host: Annotated[Host, AfterValidator(own_address)] = "127.0.0.1"
    """address at which other machines reach this machine's workers; engines listen only on its network device"""
    kv_port: Port = 5600
    """first of the NIXL side-channel ports; each worker has one, and answers there how to read its KV"""
    stream_port: Port | None = None
    """first of the workers' ports for frontends; a role that runs alone adds its `--index`; not set: free ports"""
    pages_port: Port | None = None
    """first of the ports for pages (`/metrics`, `/live`, `/ready`), counted as `stream-port`; not set: free ports"""
    state_dir: File = Path("~/.pdserve")
    """folder for the data of the NATS and etcd that `serve` starts; a relative path counts from the file's folder"""
    request_timeout: Seconds = 600.0
    """seconds; the deadline of a request that sets none"""
    drain_timeout: SecondsOrZero = 30.0
    """seconds; time for running requests to finish after SIGTERM"""
    otlp_endpoint: Annotated[TracesUrl | None, BeforeValidator(_text)] = None
    """OpenTelemetry collector for [traces](traces.md), as in http://127.0.0.1:4318; not set: no traces"""


@dataclass(frozen=True)
class SloSection(Section):
    """The model's SLO. If several files have workers of one model, the shortest of each time counts."""

    ttft: Duration = None
    """longest time from a request's arrival to its first token; not set: not promised"""
    gap: Duration = None
    """longest time between two tokens of a response; not set: not promised"""


@dataclass(frozen=True, kw_only=True)
class SecuritySection(Section):
    """Relative paths count from the YAML's folder."""

    credentials: File | None = None
    """folder made by `pdserve credentials`, the same on all hosts: NATS, etcd and streams accept only its certificates;
    not set: `serve` makes one for this run if it starts both servers, else none"""
    api_keys: File | None = None
    """file of [API keys](frontend.md#api-keys) with names and limits; keys of PDSERVE_API_KEYS are accepted too"""
    tls_certificate: File | None = None
    """certificate of the OpenAI API with its chain, in PEM; clients then connect by https"""
    tls_key: File | None = None
    """private key of `tls-certificate`, in PEM"""
    allow: Allowances = ()
    """what other machines may reach unprotected: `no-keys`, an API without keys; `plain-http`, without TLS (as behind a
    proxy); `plain-graph`, NATS, etcd and streams without credentials"""


@dataclass(frozen=True)
class Config(GraphSection):
    path: Path
    """the YAML file, for messages"""
    model: str
    """absolute path of a model folder, or a hub id; for `demo` the bundled model's folder"""
    served_model_name: str
    """the name that clients put into `model`"""
    frontend: FrontendConfig | None
    decode: DecodeConfig | None
    prefill: PrefillConfig | None
    security: SecuritySection = field(default_factory=SecuritySection)
    """with absolute paths"""
    slo: SloTargets = NO_SLO
    from_environment: tuple[str, ...] = ()
    """variables that replaced keys of the file, with the keys"""
    notes: tuple[str, ...] = ()
    """full sentences to show once at start, such as those about keys that mean something else in Dynamo"""

    @property
    def spans_hosts(self) -> bool:
        return any(worker is not None and worker.nodes > 1 for worker in (self.decode, self.prefill))

    @property
    def scheme(self) -> str:
        return "https" if self.security.tls_certificate else "http"

    @property
    def url(self) -> str:
        """Address of this machine's frontends; empty without one."""
        if self.frontend is None:
            return ""
        return f"{self.scheme}://{url_host(self.frontend.host, '127.0.0.1')}:{self.frontend.port}"
