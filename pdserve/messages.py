"""Every message that crosses a process boundary on the way of a request, one section for each receiver. What processes
say of themselves in the registry is in `records.py`.

All are frozen msgspec structs. A new field gets a default, unknown fields are ignored, so that neighbouring versions
understand each other. No message names a time: clocks of different hosts differ, and so do their monotonic ones. There
are only durations, in seconds, and ages at the moment of sending. Nothing is ever pickled.
"""

import math
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from pdserve.errors import ProtocolError

T = TypeVar("T")


class Hop(Struct, frozen=True):
    """A part of one request's way, as the process that timed it tells."""

    name: str
    """of `watch.HOPS`"""
    start: float
    """seconds, from when the process that tells it got the request"""
    seconds: float = 0.0
    """0 for what takes no time: a migration, a fallback"""
    instance: str = ""
    """id of the process in which it was; where two had a part in it (`transfer`), the one that the KV came from"""
    why: str = ""
    """a word or a sentence: the reason of a decision or of a failure"""


# ── decode worker, from a frontend ────────────────────────────────────────────────────────────────────────────────


class Submit(Struct, frozen=True, tag=True):
    """Generate. Answered by `Placed`, then `Outputs` until one of them finishes the request, or by `Failed`."""

    request_id: str
    """unique per attempt, for ever: a migrated or retried request comes with a new id"""
    prompt: list[int]
    """token ids; never empty"""
    timeout: float
    """seconds until its deadline"""
    body: list[bytes]
    """vLLM's EngineCoreRequest without its prompt, in vLLM's own encoding; opaque to all but engines"""
    migrated: bool = False
    """a worker that had taken it up lost it: compute its prompt here, and do not go the same way again"""
    engines_died: int = 0
    """in a row, each while it computed this request's next token: above 0 the request is a suspect"""
    traceparent: str = ""
    """W3C trace context of the span that it is a part of; empty: not traced"""


class Cancel(Struct, frozen=True, tag=True):
    """Stop these; unknown ids are ignored, and nothing is answered."""

    request_ids: list[str]


class Hello(Struct, frozen=True, tag=True):
    """First message of a frontend on a connection; a worker of another vLLM version answers `Refused`."""

    vllm_version: str
    follow_cache: bool = False
    """send `PrefixesChanged` from now on; said again with each change of mind"""
    follow_load: bool = False
    """send `WorkerLoad`, which an older frontend cannot read"""


ToDecode = Submit | Cancel | Hello


# ── frontend, from a decode worker ────────────────────────────────────────────────────────────────────────────────


class Placed(Struct, frozen=True, tag=True):
    """How the prompt gets its KV, sent before the request's first output; again where it came otherwise, and with all
    hops when the decode engine has done its first step for it."""

    request_id: str
    prefill: str
    """`local` or `remote`"""
    reason: str
    cached: int = 0
    """prompt tokens that were a prefix hit at this worker or the prefill worker, where it is remote"""
    hops: list[Hop] = []
    """all that are known at this worker so far, in the order of their starts"""


class Outputs(Struct, frozen=True, tag=True):
    """One engine step's outputs for the receiving frontend, in vLLM's own encoding of EngineCoreOutputs."""

    body: list[bytes]


class Failed(Struct, frozen=True, tag=True):
    """This request ends here. `retry` is true where another worker may well succeed."""

    request_id: str
    message: str
    retry: bool = False
    invalid: bool = False
    """the request itself is at fault, and no worker will do it: a 400"""
    engines_died: int = 0
    """as in `Submit`, with those that this worker knows of: only what an engine's own worker reports before it ends
    counts. A worker that is gone without a word was killed or cut off, which is no request's fault."""


class Load(Struct, frozen=True):
    """What a process is doing."""

    running: int = 0
    """requests inside the engine's batch; of a frontend: sequences that are being generated"""
    waiting: int = 0
    """requests admitted but not yet running, those out for remote prefill included; of a frontend: requests in line"""
    kv_usage: float = 0.0
    """share of the KV blocks in use, 0 to 1"""
    tokens: int = 0
    """outstanding: prompts and outputs so far of all that runs or waits, shared prefixes counted for each"""
    queue_depth: int = 0
    """prefill requests not yet pulled, as this process sees the queue"""
    queue_limit: int = 0
    """of a decode worker: the depth from which on it prefills locally; 0: it has none"""


class WorkerLoad(Struct, frozen=True, tag=True):
    """To frontends that follow it, when it has changed, a few times a second at most: to route by."""

    load: Load


class PrefixesChanged(Struct, frozen=True, tag=True):
    """What is new in the worker's prefix cache and what is gone, by the names of `prefixes.py`. For frontends that
    follow it only, a few times a second at most."""

    block_size: int
    """tokens"""
    stride: int
    """blocks from each name that is told to the next"""
    stored: list[bytes]
    removed: list[bytes]
    whole: bool = False
    """what is not here is not cached: the first of these messages"""


class Refused(Struct, frozen=True, tag=True):
    """The worker will not work with this frontend (other vLLM version, or draining)."""

    message: str


ToFrontend = Placed | Outputs | Failed | WorkerLoad | PrefixesChanged | Refused


# ── prefill worker, from a decode worker, through the queue ───────────────────────────────────────────────────────


class PrefillRequest(Struct, frozen=True, tag=True):
    """Compute the KV of `prompt` and keep it until it is pulled."""

    request_id: str
    """unique per attempt"""
    decode: str
    """instance id of the decode worker to answer"""
    prompt: list[int]
    timeout: float
    """seconds from its storing in the queue to its deadline"""
    block_size: int
    """the decode side's tokens per KV block; must equal the prefill side's"""
    body: list[bytes]
    warm_up: bool = False
    """sent to one prefill worker, beside the queue, so that no client's request is the first between the two"""
    traceparent: str = ""
    """as in `Submit`"""


class PrefillCancel(Struct, frozen=True, tag=True):
    """The decode worker no longer wants these: drop them where queued, abort them where running."""

    request_ids: list[str]


class PrefillConfirm(Struct, frozen=True, tag=True):
    """Say the answer again whose KV `worker` keeps under `held`, and with it this `token`: the answers so far may have
    been on their way for too long to be trusted. Where that KV is gone, the answer is `PrefillFailed`."""

    request_id: str
    decode: str
    worker: str
    """instance id of the prefill worker"""
    held: str
    """the handle's own `request_id`"""
    token: str


ToPrefill = PrefillCancel | PrefillConfirm


class PrefillLoad(Struct, frozen=True):
    """What a prefill worker has to do, and how fast it is."""

    tokens: int = 0
    """of prompts that it has pulled and not answered"""
    token_seconds: float = 0.0
    """that it takes for a token of a prompt, as measured; 0: not yet"""


class QueueState(Struct, frozen=True, tag=True):
    """Sent by a prefill worker with each pull, so that decode workers know the queue's depth without asking the
    server."""

    delivered_seq: int
    """highest stream sequence delivered so far"""
    pending: int
    """messages behind it, not yet delivered"""
    worker: str = ""
    """instance id of the prefill worker"""
    load: PrefillLoad = PrefillLoad()
    """of the prefill worker, with what it pulled just now"""


# ── decode worker, from a prefill worker ──────────────────────────────────────────────────────────────────────────


class KvHandle(Struct, frozen=True):
    """Where finished KV blocks lie. The prefill worker keeps them for `lease` seconds from their computation."""

    engine_id: str
    """the prefill instance id: it names the boot, so blocks of an earlier life are never read"""
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
    """of what the prefill worker has loaded"""
    lease: float = 30.0
    """seconds that the blocks are kept, counted from `computed_at`"""
    computed_at: float = -math.inf
    """When the blocks were computed at the earliest, on the monotonic clock of the host that holds this object. It
    means nothing elsewhere: a receiver sets it from what it knows of the age (`decode/answers.py`)"""
    extra: dict[str, object] = {}
    """further fields of the connector's own handle, passed on as they are"""


class PrefillStarted(Struct, frozen=True, tag=True):
    """Prefill worker `worker` has the request in its hands: if it dies, so does the answer."""

    request_id: str
    worker: str
    """its instance id"""
    queued: float = 0.0
    """seconds that it was in the queue"""


class PrefillProgress(Struct, frozen=True, tag=True):
    """The KV of the beginning of the prompt is there, and may be read ahead: `handle` is good as long as the prefill
    goes on, and only if `PrefillDone` names the same blocks was it good until then."""

    request_id: str
    handle: KvHandle


class PrefillDone(Struct, frozen=True, tag=True):
    """Said again every few seconds while the KV is kept and was not read: the decode worker takes it once, and
    rejects it where no request of its own needs it (any more)."""

    request_id: str
    handle: KvHandle
    compute_seconds: float = 0.0
    """from its pulling to its KV"""
    queued: float = 0.0
    """seconds that it was in the queue"""
    age: float = 0.0
    """seconds since the KV was computed, when this was sent"""
    token: str = ""
    """of the `PrefillConfirm` that asked for it"""
    first: list[bytes] = []
    """the first token, in vLLM's own encoding of EngineCoreOutputs; opaque to all but engines. Empty where the decode
    engine has to sample it"""


class PrefillFailed(Struct, frozen=True, tag=True):
    """The decode worker must prefill locally; `reason` is a short word for the metric's label."""

    request_id: str
    reason: str
    message: str = ""
    engine_died: bool = False
    """while it computed this prompt"""


PrefillAnswer = PrefillStarted | PrefillProgress | PrefillDone | PrefillFailed


def reader(decode: Callable[[bytes | memoryview], T]) -> Callable[[bytes | memoryview], T]:
    """`decode`, raising ProtocolError for whatever cannot be read: msgspec lets errors of Python through for text that
    is not UTF-8 and for what is nested too deep."""

    def read(data: bytes | memoryview) -> T:
        try:
            return decode(data)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ProtocolError(f"{len(data)} bytes that cannot be read: {error}") from error

    return read


encode = msgspec.msgpack.Encoder().encode
decode_to_decode = reader(msgspec.msgpack.Decoder(ToDecode).decode)
decode_to_frontend = reader(msgspec.msgpack.Decoder(ToFrontend).decode)
decode_prefill_request = reader(msgspec.msgpack.Decoder(PrefillRequest).decode)
decode_to_prefill = reader(msgspec.msgpack.Decoder(ToPrefill).decode)
decode_prefill_answer = reader(msgspec.msgpack.Decoder(PrefillAnswer).decode)
decode_queue_state = reader(msgspec.msgpack.Decoder(QueueState).decode)


def encode_to_decode(message: ToDecode) -> bytes:
    """Raises ProtocolError for what does not fit the wire."""
    try:
        return encode(message)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error
