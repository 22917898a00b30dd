"""A request of the simulated engine, and the parts of vLLM's engine messages that the engine reads and writes for it,
without importing vLLM.

vLLM encodes these structs as arrays, so the order of the fields is the contract and a shorter array means defaults for
the rest. `tests/engine/test_sim_wire.py` decodes them with vLLM's own decoder and compares field by field."""

import time
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from pdserve.engine.base import Output
from pdserve.errors import ProtocolError
from pdserve.messages import KvHandle

STOP, LENGTH, ABORT, ERROR = 0, 1, 2, 3
"""vLLM's FinishReason"""


class Sampling(Struct, frozen=True):
    """What the simulation uses of SamplingParams; like vLLM's, it travels as a map without the defaults."""

    max_tokens: int | None = 16
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, object] | None = None


class CoreRequest(Struct, array_like=True, frozen=True):
    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[msgspec.Raw] | None
    sampling_params: Sampling | None
    pooling_params: msgspec.Raw | None = None
    arrival_time: float = 0.0
    lora_request: msgspec.Raw | None = None
    cache_salt: str | None = None

    def max_tokens(self, fit: int) -> int:
        """Of the `fit` that have room."""
        asked = None if self.sampling_params is None else self.sampling_params.max_tokens
        return fit if asked is None else min(asked, fit)


class PrefillStats(Struct, frozen=True):
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class CoreOutput(Struct, array_like=True, frozen=True):
    request_id: str
    new_token_ids: list[int]
    new_logprobs: None = None
    new_prompt_logprobs_tensors: None = None
    pooling_output: None = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    trace_headers: None = None
    prefill_stats: PrefillStats | None = None


class CoreOutputs(Struct, array_like=True, frozen=True):
    engine_index: int = 0
    outputs: list[CoreOutput] = []
    scheduler_stats: None = None
    timestamp: float = msgspec.field(default_factory=time.monotonic)


_outputs = msgspec.msgpack.Decoder(CoreOutputs)
_request = msgspec.msgpack.Decoder(CoreRequest)
_encoder = msgspec.msgpack.Encoder()


def read_request(body: list[bytes]) -> CoreRequest:
    """The first frame holds everything that is read here; tensors would lie in the others. An empty body, as tests
    send, is a request with every default. Raises ProtocolError."""
    try:
        return _request.decode(body[0]) if body else CoreRequest("", None, None, Sampling())
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"unreadable request body: {error}") from error


def write_request(sampling: Sampling) -> list[bytes]:
    return [_encoder.encode(CoreRequest("", None, None, sampling))]


def read_output(packed: list[bytes], request_id: str, last: bool) -> CoreOutput | None:
    """The one that there should be, as this request's, and as its last."""
    try:
        (output,) = _outputs.decode(packed[0]).outputs
    except (msgspec.MsgspecError, ValueError, IndexError):
        return None
    return msgspec.structs.replace(output, request_id=request_id, finish_reason=LENGTH if last else None)


def write_outputs(outputs: list[CoreOutput]) -> list[bytes]:
    return [_encoder.encode(CoreOutputs(outputs=outputs))]


def refused(request_id: str) -> Output:
    raw = CoreOutput(request_id, [], finish_reason=ERROR)
    text = "structured_outputs cannot be compiled by the engine (sim)"
    return Output(request_id, [], True, failed=True, refused=text, raw=raw)


@dataclass(eq=False)
class SimRequest:
    request_id: str
    prompt: list[int]
    """with the tokens that were sampled elsewhere"""
    max_tokens: int
    whole: list[int]
    """what the full blocks of its prompt will hold"""
    cache_salt: str | None = None
    kv: KvHandle | None = None
    """pull the prompt's KV from there"""
    keep: bool = False
    """a prefill: its blocks stay for the lease"""
    plain: bool = False
    """a prefill whose token is not its request's"""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """prompt tokens whose KV is here"""
    cached: int = 0
    told: int = 0
    """blocks of it that were named as complete"""
    pulled: int = 0
    begun: float | None = None
    """monotonic: when its KV had been pulled, or could not be"""
    tokens: list[int] = field(default_factory=list)
    unread: bool = False
    """its KV could not be pulled"""
    salt: int = 0
    """not 0: the KV that it pulled was that of another prompt"""
    gone: bool = False
    """cancelled: the running step has no output for it"""

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.prompt)

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.max_tokens

    def output(self, handle: KvHandle | None) -> Output:
        """For the newest token."""
        raw = CoreOutput(
            self.request_id,
            self.tokens[-1:],
            finish_reason=LENGTH if self.finished else None,
            prefill_stats=self._stats() if len(self.tokens) == 1 else None,
        )
        tokens = [] if self.plain else self.tokens[-1:]
        first = len(self.tokens) == 1
        return Output(
            self.request_id,
            tokens,
            self.finished,
            handle,
            recomputed=self.unread and first,
            begun=self.begun if first else None,
            raw=raw,
        )

    def _stats(self) -> PrefillStats:
        reused = self.cached + self.pulled
        computed = len(self.prompt) - reused
        return PrefillStats(len(self.prompt), computed, reused, self.cached, self.pulled, computed)
