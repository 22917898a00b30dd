"""The messages that cross process boundaries on the path of a request, one section for each receiver. The records in
the registry are in `records.py`.

All are frozen msgspec structs. A new field has a default and unknown fields are ignored, so that neighbouring versions
understand each other. Times are durations in seconds or ages at sending, never timestamps, because the clocks of hosts
differ.
"""

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pdserve.util.errors import ProtocolError

T = TypeVar("T")


class Hop(Struct, frozen=True):
    """A stage of a request, as one process measured it."""

    name: str
    """one of `reports.HOPS`"""
    start: float
    """seconds since the reporting process received the request"""
    seconds: float = 0.0
    """duration; 0 for an event such as a migration or a fallback"""
    instance: str = ""
    """id of the process; for a `transfer`, of the sender of the KV"""
    why: str = ""
    """reason of a decision or failure: a word or a sentence"""


# ── to a decode worker, from a frontend ─────────────────────────────────────────────────────────────────────────────


class Promise(Struct, frozen=True):
    """The SLO of a request, in seconds; None: no SLO."""

    ttft: float | None = None
    """time left, at sending, until the first token is due; of a migrated request, the next token. Below 0: overdue"""
    gap: float | None = None
    """longest time between two tokens"""


class Submit(Struct, frozen=True, tag=True):
    """Generate. The worker sends `Placed`, then `Outputs` until the request ends. `Failed` may end it at any time."""

    request_id: str
    """unique for each attempt: a migration or retry has a new id"""
    prompt: list[int]
    """token ids; never empty"""
    timeout: float
    """seconds until the request's deadline"""
    body: list[bytes]
    """vLLM's EngineCoreRequest without its prompt, in vLLM's encoding; only engines read it"""
    migrated: bool = False
    """an earlier worker accepted the request and was lost, so prefill it locally: a remote prefill may fail again"""
    engines_died: int = 0
    """consecutive engines that died while they computed this request's next token; above 0 the request is a suspect"""
    traceparent: str = ""
    """W3C trace context of the parent span; empty: not traced"""
    client: str = ""
    """the client's name in fair queues, the same at all frontends; begins with `slo.FLEX_PREFIX` for flex requests"""
    promise: Promise | UnsetType = UNSET
    """UNSET: no SLO"""


class Cancel(Struct, frozen=True, tag=True):
    """Stop these requests. The worker ignores unknown ids and does not reply."""

    request_ids: list[str]


class Hello(Struct, frozen=True, tag=True):
    """A frontend's first message on a connection. A worker of another vLLM version replies `Refused`."""

    vllm_version: str
    follow_cache: bool = False
    """send `PrefixesChanged` from now on; a later `Hello` may change this"""
    follow_load: bool = False
    """send `WorkerLoad`, which older frontends cannot read"""


class GetArchive(Struct, frozen=True, tag=True):
    """Send the model's archive (`stream/archives.py`) in `ArchivePart`s."""


ToDecode = Submit | Cancel | Hello | GetArchive


# ── to a frontend, from a decode worker ─────────────────────────────────────────────────────────────────────────────


class Placed(Struct, frozen=True, tag=True):
    """How the prompt gets its KV. Sent before the request's first output, again if the decision changes, and again with
    all hops after the decode engine's first step for the request."""

    request_id: str
    prefill: str
    """`local` or `remote`"""
    reason: str
    cached: int = 0
    """remote prefill: prompt tokens that were a prefix hit at this worker or the prefill worker"""
    hops: list[Hop] = []
    """hops that this worker knows so far, ordered by start"""
    begun: bool = False
    """the engine has run a step for the request, so that pausing it frees a slot"""


class Outputs(Struct, frozen=True, tag=True):
    """The outputs of one engine step for this frontend, in vLLM's encoding of EngineCoreOutputs."""

    body: list[bytes]


class Failed(Struct, frozen=True, tag=True):
    """The request failed at this worker."""

    request_id: str
    message: str
    retry: bool = False
    """another worker may succeed"""
    invalid: bool = False
    """the request is invalid, so every worker would refuse it; 400"""
    engines_died: int = 0
    """`Submit.engines_died`, plus 1 if this worker's engine died and this request may be the cause"""


class Load(Struct, frozen=True):
    """The load of a process."""

    running: int = 0
    """requests in the engine's batch; of a frontend: sequences being generated"""
    waiting: int = 0
    """requests that are admitted but not running, including those in remote prefill; of a frontend: queued requests"""
    kv_usage: float = 0.0
    """share of the KV blocks in use, 0 to 1"""
    tokens: int = 0
    """prompt and output tokens of all running and waiting requests; a shared prefix counts for each request"""
    queue_depth: int = 0
    """prefill requests not yet pulled, as this process knows the queue"""
    queue_limit: int = 0
    """decode worker: queue depth from which on it prefills locally; 0: no limit"""
    remote: int = 0
    """of `waiting`: requests in remote prefill, which need no slot yet"""
    backlog: float = 0.0
    """seconds that one worker needs for work that no engine has begun: prompts of a decode worker, queued requests of a
    frontend"""
    prompt_wait: float = 0.0
    """decode worker: expected seconds until a new prompt starts, locally or remotely"""
    token_seconds: float = 0.0
    """expected seconds per token of a new prompt"""
    gap_seconds: float = 0.0
    """the longer of two means: of a step without prompts, and from the end of a remote prefill to the next token"""


class WorkerLoad(Struct, frozen=True, tag=True):
    """The worker's load, for routing. Sent to frontends that follow it, on changes, at most a few times a second."""

    load: Load
    make_way: int = 0
    """number of requests to pause at this worker, because other clients' requests wait in its engine. The frontend
    pauses requests of the clients that have most running"""


class PrefixesChanged(Struct, frozen=True, tag=True):
    """KV blocks that entered and left the worker's prefix cache, by the names of `prefixes.py`. Sent to frontends that
    follow it, a few times a second at most."""

    block_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    """tokens"""
    stride: Annotated[int, Meta(ge=1)]
    """every `stride`th block of a prompt is reported"""
    stored: list[bytes]
    removed: list[bytes]
    whole: bool = False
    """`stored` is the whole cache (first message)"""


class Refused(Struct, frozen=True, tag=True):
    """The worker does not serve this frontend, because their vLLM versions differ or the worker is draining."""

    message: str


class ArchivePart(Struct, frozen=True, tag=True):
    """The next bytes of the model's archive; empty: the archive is complete."""

    data: bytes = b""


ToFrontend = Placed | Outputs | Failed | WorkerLoad | PrefixesChanged | Refused | ArchivePart


# ── to a prefill worker, from a decode worker ─────────────────────────────────────────────────────────────────────


class PrefillRequest(Struct, frozen=True, tag=True):
    """Compute the KV of `prompt` and keep it for the decode worker. `body` and `traceparent` as in `Submit`."""

    request_id: str
    """unique for each attempt"""
    decode: str
    """instance id of the decode worker that gets the reply"""
    prompt: list[int]
    timeout: float
    """seconds, from storing it in the queue, until the decode worker gives up and prefills locally"""
    block_size: int
    """the decode worker's tokens per KV block; must equal the prefill worker's"""
    body: list[bytes]
    warm_up: bool = False
    """a warm-up, sent to one prefill worker outside the queue"""
    traceparent: str = ""
    held: float = 0.0
    """seconds that the request waited at the decode worker before it was stored"""
    reads_state: bool = False
    """the decode worker reads `PrefillStarted.state`; for an older one, the prefill worker broadcasts each pull"""
    begin_within: float = 0.0
    """above 0: sent outside the queue to one prefill worker, which has the prompt's prefix cached ("addressed").
    The worker begins the request within this many seconds of its arrival, or not at all"""
    client: str = ""
    """as in `Submit`; only if `begin_within` is above 0"""
    due: float | None = None
    """seconds, at sending, until the first token is due; None: no SLO; only if `begin_within` is above 0"""


class PrefillCancel(Struct, frozen=True, tag=True):
    """Drop these requests if they are queued, and abort them if they run."""

    request_ids: list[str]


ToPrefill = PrefillCancel


# ── to decode workers, from prefill workers and each other ────────────────────────────────────────────────────────


class PrefillLoad(Struct, frozen=True):
    """A prefill worker's outstanding work and speed."""

    tokens: int = 0
    """prompt tokens of the requests that it has pulled and not finished"""
    token_seconds: float = 0.0
    """measured seconds per prompt token; 0: not measured yet"""


class QueueState(Struct, frozen=True, tag=True):
    """The queue and one prefill worker after a pull, so that decode workers know both without asking NATS. The decode
    worker whose request was pulled gets it in `PrefillStarted`, all others by broadcasts at a bounded rate
    (`queue/reports.py`)."""

    delivered_seq: int
    """highest stream sequence delivered so far"""
    pending: int
    """number of later messages, not yet delivered"""
    worker: str = ""
    """instance id of the prefill worker"""
    load: PrefillLoad = PrefillLoad()
    """the prefill worker's load, including the requests just pulled"""


class PrefillPrefixes(Struct, frozen=True, tag=True):
    """Changes of a prefill worker's prefix cache, for decode workers."""

    worker: str
    """instance id of the prefill worker"""
    changed: PrefixesChanged


class HeldRequests(Struct, frozen=True, tag=True):
    """Number of requests that a decode worker holds back. Sent on changes, and each second if above 0."""

    sender: str
    """random id of the decode worker's process"""
    count: int


class KvHandle(Struct, frozen=True):
    """Location of finished KV blocks. The prefill worker keeps them until they are read or rejected, or `lease` is
    over."""

    engine_id: str
    """the prefill worker's instance id, new at each start, so that blocks of an earlier process are never read"""
    request_id: str
    """id under which the prefill engine holds the blocks"""
    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    block_ids: list[list[int]]
    """per KV cache group, in prompt order"""
    num_tokens: int
    """prompt tokens whose KV is in the blocks"""
    block_size: int
    tp_size: int = 1
    fingerprint: str = ""
    """fingerprint of the prefill worker's model (`engine/fingerprint.py`)"""
    lease: float = 30.0
    """seconds for which the blocks are kept, by the prefill engine's clock (`kv/leases.py`)"""
    extra: dict[str, object] = {}
    """further fields of the connector's handle, passed on unchanged"""


class PrefillStarted(Struct, frozen=True, tag=True):
    """A prefill worker has pulled the request. If that worker dies, no result comes."""

    request_id: str
    worker: str
    """instance id of the prefill worker"""
    queued: float = 0.0
    """seconds that the request was in the queue"""
    state: QueueState | None = None
    """after this pull; None from older workers, and for warm-ups"""


class PrefillProgress(Struct, frozen=True, tag=True):
    """The KV of the first part of the prompt is ready and may be read ahead. It is valid only if `PrefillDone` names
    the same blocks."""

    request_id: str
    handle: KvHandle


class PrefillDone(Struct, frozen=True, tag=True):
    """The KV is ready. Repeated every few seconds until the KV is read or rejected, or its lease ends. The decode
    worker uses the first copy, and rejects the KV if no request of its own needs it."""

    request_id: str
    handle: KvHandle
    compute_seconds: float = 0.0
    """from submitting the prompt to the engine to the finished KV"""
    queued: float = 0.0
    """seconds that the request was in the queue"""
    first: list[bytes] = []
    """the first token, in vLLM's encoding of EngineCoreOutputs; empty: the decode engine samples it"""
    engine_queued: float = 0.0
    """part of `compute_seconds` that the prompt was in the engine's waiting queue"""


RETURNED = "returned"
"""`PrefillFailed.reason` of an addressed request (`begin_within`) that its worker will not begin."""


class PrefillFailed(Struct, frozen=True, tag=True):
    """The prefill failed. The decode worker prefills locally or, if the reason is `RETURNED`, publishes the request."""

    request_id: str
    reason: str
    """a word for the metric's label"""
    message: str = ""
    engine_died: bool = False
    """the engine died while it computed this prompt"""


PrefillAnswer = PrefillStarted | PrefillProgress | PrefillDone | PrefillFailed


def safe_decoder(decode: Callable[[bytes | memoryview], T]) -> Callable[[bytes | memoryview], T]:
    """Wrap `decode` to raise ProtocolError for all invalid data. msgspec alone raises other errors for text that is not
    UTF-8 and for data that is nested too deep."""

    def safe_decode(data: bytes | memoryview) -> T:
        try:
            return decode(data)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ProtocolError(f"cannot decode {len(data)} bytes: {error}") from error

    return safe_decode


encode = msgspec.msgpack.Encoder().encode
decode_to_decode = safe_decoder(msgspec.msgpack.Decoder(ToDecode).decode)
decode_to_frontend = safe_decoder(msgspec.msgpack.Decoder(ToFrontend).decode)
decode_prefill_request = safe_decoder(msgspec.msgpack.Decoder(PrefillRequest).decode)
decode_to_prefill = safe_decoder(msgspec.msgpack.Decoder(ToPrefill).decode)
decode_prefill_answer = safe_decoder(msgspec.msgpack.Decoder(PrefillAnswer).decode)
decode_queue_state = safe_decoder(msgspec.msgpack.Decoder(QueueState).decode)
decode_prefill_prefixes = safe_decoder(msgspec.msgpack.Decoder(PrefillPrefixes).decode)
decode_held_requests = safe_decoder(msgspec.msgpack.Decoder(HeldRequests).decode)


def encode_to_decode(message: ToDecode) -> bytes:
    """Raises ProtocolError if the message cannot be encoded."""
    try:
        return encode(message)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"cannot encode {type(message).__name__}: {error}") from error
