"""The simulated engine's requests, and the parts of vLLM's engine messages that it reads and writes without vLLM.

vLLM encodes these structs as arrays: the order of the fields is the contract, and missing fields at the end have their
defaults. `tests/engine/test_sim_wire.py` compares them with vLLM's own."""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from zlib import crc32

import msgspec
from msgspec import Struct
from msgspec.msgpack import Ext

from pdserve.contract.messages import KvHandle
from pdserve.contract.prefixes import PrefixKey, PromptImage, prompt_images, root_name
from pdserve.engine.base import Output
from pdserve.engine.sim.model import SimModel, seed_of
from pdserve.util.errors import ProtocolError

LENGTH, ERROR = 1, 3
"""Values of vLLM's FinishReason."""
_RAW = 3
"""vLLM's extension type for the bytes of an array"""
_UNLIKELY = -9999.0
"""Logprob of each token but the generated one."""


class Sampling(Struct, frozen=True):
    """The used part of SamplingParams, which vLLM encodes as a map without the defaults."""

    max_tokens: int | None = 16
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, object] | None = None
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None


class Lora(Struct, array_like=True, frozen=True):
    """The used part of LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class Placeholders(Struct, frozen=True):
    """The used part of PlaceholderRange."""

    offset: int
    length: int


class Feature(Struct, frozen=True):
    """The used part of MultiModalFeatureSpec."""

    identifier: str
    mm_position: Placeholders


class CoreRequest(Struct, array_like=True, frozen=True):
    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[Feature] | None
    sampling_params: Sampling | None
    pooling_params: msgspec.Raw | None = None
    arrival_time: float = 0.0
    lora_request: Lora | None = None
    cache_salt: str | None = None

    @property
    def adapter(self) -> int:
        return self.lora_request.lora_int_id if self.lora_request is not None else 0

    @property
    def root(self) -> bytes:
        """Name of the parent of its first block."""
        return root_name(self.cache_salt, self.adapter)

    @property
    def images(self) -> list[PromptImage]:
        return prompt_images(self.mm_features)

    @property
    def prefix_key(self) -> PrefixKey:
        return PrefixKey(self.cache_salt, self.adapter, self.images)

    @property
    def salt(self) -> int:
        """Hash of adapter and images, on which generated tokens depend besides the tokens before them."""
        return self.adapter ^ crc32("".join(image.name for image in self.images).encode())

    @property
    def sampling(self) -> Sampling:
        return self.sampling_params or Sampling(max_tokens=None)

    def max_tokens(self, fit: int) -> int:
        """How many tokens to generate, at most `fit`."""
        asked = self.sampling.max_tokens
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
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
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
    """Read the first frame; others hold tensors. No frame: a request with defaults. Raises ProtocolError."""
    try:
        return _request.decode(body[0]) if body else CoreRequest("", None, None, Sampling())
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"unreadable request body: {error}") from error


def write_request(sampling: Sampling) -> list[bytes]:
    return [_encoder.encode(CoreRequest("", None, None, sampling))]


def read_output(packed: list[bytes], request_id: str, last: bool) -> CoreOutput | None:
    """Return the single output in `packed` under this request's id, finished if `last`; None if it cannot be read."""
    try:
        (output,) = _outputs.decode(packed[0]).outputs
    except (msgspec.MsgspecError, ValueError, IndexError):
        return None
    return msgspec.structs.replace(output, request_id=request_id, finish_reason=LENGTH if last else None)


def write_outputs(outputs: list[CoreOutput]) -> list[bytes]:
    return [_encoder.encode(CoreOutputs(outputs=outputs))]


def logprobs(rows: Sequence[Sequence[int]], kinds: tuple[str, str]) -> list[object]:
    """vLLM's table of logprobs: for each token a row of token ids, of which the first is the token itself. `kinds`: the
    receiving library's names for 32-bit integers and floats."""
    integers, floats = kinds
    shape = (len(rows), len(rows[0]) if rows else 0)
    ids = array("i", chain.from_iterable(rows))
    values = array("f", (0.0 if token == row[0] else _UNLIKELY for row in rows for token in row))
    ranks = array("i", [1] * len(rows))
    return [
        (integers, shape, Ext(_RAW, ids.tobytes())),
        (floats, shape, Ext(_RAW, values.tobytes())),
        (integers, shape[:1], Ext(_RAW, ranks.tobytes())),
    ]


def refused(request_id: str) -> Output:
    raw = CoreOutput(request_id, [], finish_reason=ERROR)
    text = "structured_outputs cannot be compiled by the engine (sim)"
    return Output(request_id, [], True, failed=True, refused=text, raw=raw)


@dataclass(eq=False)
class SimRequest:
    request_id: str
    prompt: list[int]
    """Including tokens that another engine sampled."""
    max_tokens: int
    asked: CoreRequest
    whole: list[int]
    """Contents of the prompt's full blocks once they are computed."""
    kv: KvHandle | None = None
    keep: bool = False
    """Whether it is a prefill, whose blocks are kept until they are read or the KV lease ends."""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Prompt tokens whose KV is in this engine."""
    cached: int = 0
    named: int = 0
    """Blocks of a prefill that were reported as complete."""
    pulled: int = 0
    begun: float | None = None
    """Monotonic time at which it had its blocks and, with `kv`, the read of its KV had ended."""
    tokens: list[int] = field(default_factory=list)
    unread: bool = False
    """Whether the KV could not be read."""
    salt: int = 0
    """`CoreRequest.salt`, changed if the KV that was read is another prompt's."""
    seed: int = 0
    """Hash of all tokens so far."""
    gone: bool = False
    """Whether it is cancelled, so that the current step has no output for it."""

    def __post_init__(self) -> None:
        self.salt, self.seed = self.asked.salt, seed_of(self.prompt)

    @property
    def sampling(self) -> Sampling:
        return self.asked.sampling

    @property
    def plain(self) -> bool:
        """Whether it is a prefill whose token is not the first of the client's request."""
        return self.keep and self.sampling.structured_outputs is not None

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.prompt)

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.max_tokens

    def output(self, handle: KvHandle | None, model: SimModel) -> Output:
        first = len(self.tokens) == 1
        raw = CoreOutput(
            self.request_id,
            self.tokens[-1:],
            self._logprobs(model),
            self._prompt_logprobs(model) if first else None,
            finish_reason=LENGTH if self.finished else None,
            prefill_stats=self._stats() if first else None,
        )
        tokens = [] if self.plain else self.tokens[-1:]
        return Output(
            self.request_id,
            tokens,
            self.finished,
            handle,
            recomputed=self.unread and first,
            begun=self.begun if first else None,
            raw=raw,
        )

    def _logprobs(self, model: SimModel) -> list[object] | None:
        token, asked = self.tokens[-1], self.sampling
        likely = asked.logprob_token_ids
        if not likely and asked.logprobs is not None:
            likely = model.likely(token, asked.logprobs)
        return None if likely is None else logprobs([[token, *likely]], ("<i4", "<f4"))

    def _prompt_logprobs(self, model: SimModel) -> list[object] | None:
        if (count := self.sampling.prompt_logprobs) is None:
            return None
        rows = [[token, *model.likely(token, count)] for token in self.prompt[1:]]
        return logprobs(rows, ("int32", "float32"))

    def _stats(self) -> PrefillStats:
        reused = self.cached + self.pulled
        computed = len(self.prompt) - reused
        return PrefillStats(len(self.prompt), computed, reused, self.cached, self.pulled, computed)


def load_of(share: list[tuple[SimRequest, int]]) -> tuple[int, int, list[tuple[int, int]]]:
    """Arguments of `SimModel.step_time` for a step that computes `share`: requests with their numbers of tokens."""
    decoding = [request for request, _ in share if not request.prefilling]
    context = sum(len(request.prompt) + len(request.tokens) for request in decoding)
    return (
        len(decoding),
        context,
        [(request.computed, count) for request, count in share if request.prefilling],
    )
