"""The parts of vLLM's engine messages that the simulated engine reads and writes, without importing vLLM.

vLLM encodes these structs as arrays, so the order of the fields is the contract and a shorter array means
defaults for the rest. `tests/engine/test_sim_wire.py` decodes them with vLLM's own decoder and compares
field by field."""

import time

import msgspec
from msgspec import Struct

STOP, LENGTH, ABORT, ERROR = 0, 1, 2, 3
"""vLLM's FinishReason"""


class Sampling(Struct, frozen=True):
    """What the simulation honours of SamplingParams; like vLLM's, it travels as a map without the
    defaults."""

    max_tokens: int | None = 16
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, object] | None = None


class CoreRequest(Struct, array_like=True, frozen=True):
    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[msgspec.Raw] | None
    sampling_params: Sampling | None


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


_request = msgspec.msgpack.Decoder(CoreRequest)
_encoder = msgspec.msgpack.Encoder()


def read_request(body: list[bytes]) -> CoreRequest:
    """The first frame holds everything that is read here; tensors would lie in the others. An empty body,
    as tests send, is a request with every default."""
    return _request.decode(body[0]) if body else CoreRequest("", None, None, Sampling())


def write_request(sampling: Sampling) -> list[bytes]:
    return [_encoder.encode(CoreRequest("", None, None, sampling))]


def write_outputs(outputs: list[CoreOutput]) -> list[bytes]:
    return [_encoder.encode(CoreOutputs(outputs=outputs))]
