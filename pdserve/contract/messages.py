"""Every message that crosses a process boundary on the way of a request, one section for each receiver. The records
that processes write to the registry are in `records.py`.

All are frozen msgspec structs. A new field gets a default and unknown fields are ignored, so that neighbouring versions
understand each other. No receiver uses a point in time, since the clocks of hosts differ, monotonic ones included:
there are durations in seconds, and ages at the moment of sending. Nothing is ever pickled.
"""

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pdserve.util.errors import ProtocolError

T = TypeVar("T")


class Hop(Struct, frozen=True):
    """A stage of a request, as measured by one process."""

    name: str
    """one of `reports.HOPS`"""
    start: float
    """seconds since the reporting process got the request"""
    seconds: float = 0.0
    """duration; 0 for an event such as a migration or a fallback"""
    instance: str = ""
    """id of the process; of the two in a `transfer`, the sender of the KV"""
    why: str = ""
    """the reason of a decision or failure, a word or a sentence"""


# ── decode worker, from a frontend ────────────────────────────────────────────────────────────────────────────────


class Promise(Struct, frozen=True):
    """What is promised to the client of a request, in seconds; None: that is not promised."""

    ttft: float | None = None
    """left, when this is sent, until its first token is due; where a migrated request has tokens already, until the
    next one is. Below 0: it is late"""
    gap: float | None = None
    """the longest between two tokens"""


class Submit(Struct, frozen=True, tag=True):
    """Generate. Answered by `Placed`, then by `Outputs` until one of them finishes the request, or by `Failed`."""

    request_id: str
    """unique for each attempt: a migrated or retried request has a new id"""
    prompt: list[int]
    """token ids; never empty"""
    timeout: float
    """seconds until its deadline"""
    body: list[bytes]
    """vLLM's EngineCoreRequest without its prompt, in vLLM's own encoding; opaque to all but engines"""
    migrated: bool = False
    """an earlier worker accepted it and was lost: prefill it locally rather than repeat what failed"""
    engines_died: int = 0
    """engines in a row that died while they computed this request's next token; above 0 the request is a suspect"""
    traceparent: str = ""
    """W3C trace context of the parent span; empty: not traced"""
    client: str = ""
    """the client's name in fair queues, the same at all frontends; begins with `slo.FLEX_PREFIX` for flex requests"""
    promise: Promise | UnsetType = UNSET
    """left out where nothing is promised"""


class Cancel(Struct, frozen=True, tag=True):
    """Stop these requests. Unknown ids are ignored, and there is no answer."""

    request_ids: list[str]


class Hello(Struct, frozen=True, tag=True):
    """The first message of a frontend on a connection; a worker of another vLLM version answers `Refused`."""

    vllm_version: str
    follow_cache: bool = False
    """send `PrefixesChanged` from now on; the frontend sends another `Hello` to change this"""
    follow_load: bool = False
    """send `WorkerLoad`, which older frontends cannot read"""


class GetArchive(Struct, frozen=True, tag=True):
    """Send the archive of the model (`stream/archives.py`), in `ArchivePart`s."""


ToDecode = Submit | Cancel | Hello | GetArchive


# ── frontend, from a decode worker ────────────────────────────────────────────────────────────────────────────────


class Placed(Struct, frozen=True, tag=True):
    """How the prompt gets its KV, sent before the request's first output. Sent again if the decision changes, and with
    all hops after the decode engine's first step for the request."""

    request_id: str
    prefill: str
    """`local` or `remote`"""
    reason: str
    cached: int = 0
    """if remote, prompt tokens that were a prefix hit, at this worker or at the prefill worker"""
    hops: list[Hop] = []
    """all hops known at this worker so far, ordered by start"""
    begun: bool = False
    """the engine has done its first step for it, so that pausing it frees a place for others"""


class Outputs(Struct, frozen=True, tag=True):
    """One engine step's outputs for the receiving frontend, in vLLM's own encoding of EngineCoreOutputs."""

    body: list[bytes]


class Failed(Struct, frozen=True, tag=True):
    """The request has failed at this worker."""

    request_id: str
    message: str
    retry: bool = False
    """another worker may well succeed"""
    invalid: bool = False
    """the request itself is at fault, and every worker would refuse it: a 400"""
    engines_died: int = 0
    """as in `Submit`, this worker's engine included. Only deaths that the engine's own worker reports before it ends
    count: a worker that vanishes without a report was killed or cut off, which is no request's fault."""


class Load(Struct, frozen=True):
    """The load of a process."""

    running: int = 0
    """requests inside the engine's batch; for a frontend: sequences that are being generated"""
    waiting: int = 0
    """requests admitted but not yet running, those in remote prefill included; for a frontend: queued requests"""
    kv_usage: float = 0.0
    """share of the KV blocks in use, 0 to 1"""
    tokens: int = 0
    """prompt and output tokens so far of all running and waiting requests; shared prefixes count for each request"""
    queue_depth: int = 0
    """prefill requests not yet pulled, as this process sees the queue"""
    queue_limit: int = 0
    """for a decode worker: the queue depth from which on it prefills locally; 0: no limit"""
    remote: int = 0
    """of the waiting requests those in remote prefill, which need no place in the batch yet"""
    backlog: float = 0.0
    """seconds of one worker for what waits: prompts that no engine has (decode worker), requests (frontend)"""
    prompt_wait: float = 0.0
    """for a decode worker: seconds until a prompt that comes now is begun, here or at a prefill worker"""
    token_seconds: float = 0.0
    """for each token of that prompt"""
    gap_seconds: float = 0.0
    """from one token of a stream, or from its KV, to the next one; fades while it is not measured"""


class WorkerLoad(Struct, frozen=True, tag=True):
    """Sent for routing to frontends that follow it, when the load has changed, a few times a second at most."""

    load: Load
    make_way: int = 0
    """so many requests should pause here, of the clients with the most: others' wait in the engine"""


class PrefixesChanged(Struct, frozen=True, tag=True):
    """What was added to the worker's prefix cache and removed from it, by the names of `prefixes.py`. Sent to frontends
    that follow it, a few times a second at most."""

    block_size: int
    """tokens"""
    stride: int
    """number of blocks from one reported name to the next"""
    stored: list[bytes]
    removed: list[bytes]
    whole: bool = False
    """true in the first of these messages: what is not in `stored` is not cached"""


class Refused(Struct, frozen=True, tag=True):
    """The worker will not work with this frontend (other vLLM version, or draining)."""

    message: str


class ArchivePart(Struct, frozen=True, tag=True):
    """The next bytes of the model's archive; none: it is complete."""

    data: bytes = b""


ToFrontend = Placed | Outputs | Failed | WorkerLoad | PrefixesChanged | Refused | ArchivePart


# ── prefill worker, from a decode worker, through the queue ───────────────────────────────────────────────────────


class PrefillRequest(Struct, frozen=True, tag=True):
    """Compute the KV of `prompt` and keep it until it is read. `body`, `traceparent`: as in `Submit`."""

    request_id: str
    """unique for each attempt"""
    decode: str
    """instance id of the decode worker to answer"""
    prompt: list[int]
    timeout: float
    """seconds after its storing in the queue for which the decode worker waits; then it computes the prompt itself"""
    block_size: int
    """the decode worker's tokens per KV block; must equal the prefill worker's"""
    body: list[bytes]
    warm_up: bool = False
    """sent to one prefill worker, beside the queue, so that no client's request is the first between the two workers"""
    traceparent: str = ""
    held: float = 0.0
    """seconds that it waited at the decode worker, before it was stored"""


class PrefillCancel(Struct, frozen=True, tag=True):
    """The decode worker no longer needs these requests: drop them if queued, abort them if running."""

    request_ids: list[str]


ToPrefill = PrefillCancel


# ── decode workers, from prefill workers and each other ───────────────────────────────────────────────────────────


class PrefillLoad(Struct, frozen=True):
    """The outstanding work of a prefill worker, and its speed."""

    tokens: int = 0
    """prompt tokens of the requests that it has pulled and not answered"""
    token_seconds: float = 0.0
    """measured seconds per prompt token; 0: not measured yet"""


class QueueState(Struct, frozen=True, tag=True):
    """Sent by a prefill worker with each pull: decode workers know the queue's depth without asking the server."""

    delivered_seq: int
    """highest stream sequence delivered so far"""
    pending: int
    """messages behind it, not yet delivered"""
    worker: str = ""
    """instance id of the prefill worker"""
    load: PrefillLoad = PrefillLoad()
    """the prefill worker's load, including what it has just pulled"""


class HeldRequests(Struct, frozen=True, tag=True):
    """How many requests a process will publish; its name is new at each start. Sent every second, and if it changes."""

    sender: str
    count: int


class KvHandle(Struct, frozen=True):
    """Where finished KV blocks lie. The prefill worker keeps them until they are read, rejected, or `lease` is over."""

    engine_id: str
    """the prefill worker's instance id, new at each start: blocks of an earlier process are never read"""
    request_id: str
    """the id under which the prefill engine holds the blocks"""
    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    block_ids: list[list[int]]
    """per KV cache group, in prompt order"""
    num_tokens: int
    """prompt tokens whose KV is in the blocks"""
    block_size: int
    tp_size: int = 1
    fingerprint: str = ""
    """fingerprint of what the prefill worker has loaded"""
    lease: float = 30.0
    """seconds that the blocks are kept. Only the prefill engine knows when they end (`kv/leases.py`)"""
    extra: dict[str, object] = {}
    """further fields of the connector's own handle, passed on unchanged"""


class PrefillStarted(Struct, frozen=True, tag=True):
    """The prefill worker has the request: if the worker dies, no answer comes."""

    request_id: str
    worker: str
    """instance id of the prefill worker"""
    queued: float = 0.0
    """seconds that the request was in the queue"""


class PrefillProgress(Struct, frozen=True, tag=True):
    """The KV of the beginning of the prompt is there and may be read ahead. What was read counts only if `PrefillDone`
    names the same blocks."""

    request_id: str
    handle: KvHandle


class PrefillDone(Struct, frozen=True, tag=True):
    """The KV is there. Sent again every few seconds while the KV is kept and was not read: the decode worker uses the
    first, and rejects the KV if none of its requests needs it (any more)."""

    request_id: str
    handle: KvHandle
    compute_seconds: float = 0.0
    """from handing the prompt to the engine to the finished KV"""
    queued: float = 0.0
    """seconds that the request was in the queue"""
    first: list[bytes] = []
    """the first token, in vLLM's encoding of EngineCoreOutputs. Empty: the decode engine has to sample it"""
    engine_queued: float = 0.0
    """of `compute_seconds`: in the engine's own queue"""


class PrefillFailed(Struct, frozen=True, tag=True):
    """The decode worker must prefill locally; `reason` is a short word for the metric's label."""

    request_id: str
    reason: str
    message: str = ""
    engine_died: bool = False
    """the engine died while it computed this prompt"""


PrefillAnswer = PrefillStarted | PrefillProgress | PrefillDone | PrefillFailed


def safe_decoder(decode: Callable[[bytes | memoryview], T]) -> Callable[[bytes | memoryview], T]:
    """Wrap `decode` to raise ProtocolError for everything that cannot be read: msgspec lets Python's own errors through
    for text that is not UTF-8 and for data that is nested too deep."""

    def read(data: bytes | memoryview) -> T:
        try:
            return decode(data)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ProtocolError(f"{len(data)} bytes that cannot be read: {error}") from error

    return read


encode = msgspec.msgpack.Encoder().encode
decode_to_decode = safe_decoder(msgspec.msgpack.Decoder(ToDecode).decode)
decode_to_frontend = safe_decoder(msgspec.msgpack.Decoder(ToFrontend).decode)
decode_prefill_request = safe_decoder(msgspec.msgpack.Decoder(PrefillRequest).decode)
decode_to_prefill = safe_decoder(msgspec.msgpack.Decoder(ToPrefill).decode)
decode_prefill_answer = safe_decoder(msgspec.msgpack.Decoder(PrefillAnswer).decode)
decode_queue_state = safe_decoder(msgspec.msgpack.Decoder(QueueState).decode)
decode_held_requests = safe_decoder(msgspec.msgpack.Decoder(HeldRequests).decode)


def encode_to_decode(message: ToDecode) -> bytes:
    """Raises ProtocolError if the message cannot be encoded."""
    try:
        return encode(message)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error
