"""Tracks the requests of a vLLM engine, and translates request bodies and KV handles to vLLM's messages and back."""

import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pdserve.contract.messages import KvHandle
from pdserve.contract.prefixes import PrefixKey, prompt_images
from pdserve.contract.sampling import can_split_after_first_token
from pdserve.engine.base import EngineFacts, Read, Transfers
from pdserve.engine.lora import with_adapter
from pdserve.engine.vllm import api
from pdserve.kv import AFTER, AHEAD, CHUNK, READS
from pdserve.util import clock
from pdserve.util.errors import ProtocolError
from pdserve.util.lru import LruDict

logger = logging.getLogger(__name__)

_KV = "kv_transfer_params"
_HANDLE_FIELDS = {
    "remote_engine_id": "engine_id",
    "remote_request_id": "request_id",
    "remote_host": "host",
    "remote_port": "port",
    "remote_block_ids": "block_ids",
    "tp_size": "tp_size",
}
"""Transfer parameter of vLLM -> field of KvHandle."""
_REMEMBERED = 100_000
"""Number of newest request ids that are known as used."""


@dataclass(eq=False)
class RunningRequest:
    request_id: str
    """Its id at the worker."""
    prompt: list[int]
    body: list[bytes]
    after: Sequence[int] = ()
    """Tokens that another engine sampled."""
    prefill: bool = False
    samples: bool = False
    """Whether it is a prefill whose token is the request's first token."""
    pulls: bool = False
    """Whether the KV of its prompt is read from another engine."""
    adapter: int = 0
    """Id of its LoRA adapter; 0: none."""
    engine_id: str = ""
    """Its id in the engine; a restart gives a new one."""
    restarts: int = 0
    began: bool = False
    """Whether it has its first token."""


class RunningRequests:
    def __init__(self) -> None:
        self._by_engine_id: dict[str, RunningRequest] = {}
        self._used: LruDict[None] = LruDict(_REMEMBERED)

    def add(self, request: RunningRequest) -> None:
        """Raises ProtocolError for an id that was used before, because vLLM dies of an id that it still has."""
        if request.request_id in self._used:
            raise ProtocolError(f"request {request.request_id} was given to this engine before")
        self._used[request.request_id] = None
        request.engine_id = request.request_id
        self._by_engine_id[request.engine_id] = request

    def restart(self, request: RunningRequest) -> None:
        """Give the request a new id inside the engine, and forget the old id."""
        del self._by_engine_id[request.engine_id]
        request.restarts += 1
        request.engine_id = f"{request.request_id}#{request.restarts}"
        self._by_engine_id[request.engine_id] = request

    def drop(self, request: RunningRequest) -> None:
        del self._by_engine_id[request.engine_id]

    def by_engine_id(self, engine_id: str) -> RunningRequest | None:
        return self._by_engine_id.get(engine_id)

    def of(self, request_ids: Collection[str]) -> list[RunningRequest]:
        return [request for request in self._by_engine_id.values() if request.request_id in request_ids]

    def is_used(self, adapter: int) -> bool:
        return any(request.adapter == adapter for request in self._by_engine_id.values())

    def __len__(self) -> int:
        return len(self._by_engine_id)


def read_body(body: list[bytes]) -> api.EngineCoreRequest:
    """Raises ProtocolError for a body that is not a text generation request of this vLLM version."""
    try:
        request = api.decode_request(body)
    except (msgspec.MsgspecError, IndexError, TypeError, ValueError, NotImplementedError) as error:
        raise ProtocolError(f"unreadable request body: {error}") from error
    if request.sampling_params is None:
        raise ProtocolError("this engine serves text generation only, no pooling")
    return request


def adapter_of(request: api.EngineCoreRequest) -> int:
    return request.lora_request.lora_int_id if request.lora_request is not None else 0


def prefix_key(request: api.EngineCoreRequest) -> PrefixKey | None:
    """Return None if no other engine may prefill the request, because its prompt has embeddings, or it asks for prompt
    logprobs, for which vLLM computes the prompt and ignores KV."""
    sampling = request.sampling_params
    if request.prompt_embeds is not None or sampling is None or sampling.skip_reading_prefix_cache:
        return None
    return PrefixKey(request.cache_salt, adapter_of(request), prompt_images(request.mm_features))


def refusal(body: list[bytes], rejected: Sequence[int]) -> str:
    """Why a request's grammar made vLLM end it: the grammar does not compile, or rejected the tokens in `rejected`.
    Empty if the request has no grammar. The engine itself only logs the reason."""
    asked = read_body(body).sampling_params.structured_outputs
    if asked is None:
        return ""
    kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    kind = next((name for name in kinds if getattr(asked, name)), "structured output")
    why = "allows no further token" if rejected else "cannot be compiled by the engine"
    return f"structured_outputs.{kind} {why} ({asked._backend})"


def to_generate(
    request_id: str, prompt: list[int], body: list[bytes], kv: KvHandle | None, after: Sequence[int] = ()
) -> api.EngineCoreRequest:
    request = _sanitized(request_id, prompt, body)
    sampling = request.sampling_params
    if kv is not None:
        if prefix_key(request) is None:
            raise ProtocolError("a request that has to compute its prompt has a KV handle")
        _set_params(sampling, pull_params(kv) | {AFTER: len(after)})
    if after:
        request.prompt_token_ids = [*prompt, *after]
        sampling.max_tokens -= len(after)
        sampling.min_tokens = max(0, sampling.min_tokens - len(after))
    return request


def to_prefill(
    request_id: str, prompt: list[int], body: list[bytes], *, samples: bool
) -> tuple[api.EngineCoreRequest, bool]:
    """Return a request for one token, and whether that token is the first of the client's request. It is if `samples`
    is true and the sampling parameters allow it. Otherwise the request has no sampling parameters that could delay or
    end it, because only its KV is used."""
    request = _sanitized(request_id, prompt, body)
    if prefix_key(request) is None:
        raise ProtocolError("this prompt cannot be prefilled for another engine")
    sampling = request.sampling_params
    samples = samples and can_split_after_first_token(sampling)
    if samples:  # vLLM silently drops a request with min_tokens above max_tokens
        sampling.max_tokens, sampling.min_tokens = 1, min(1, sampling.min_tokens)
    else:
        request.sampling_params = api.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    _set_params(request.sampling_params, {"do_remote_decode": True})
    request.reasoning_parser_kwargs = None
    return request, samples


def first_output(packed: list[bytes], ended: float) -> api.EngineCoreOutput | None:
    """Unpack a prefill engine's single output, of one token; None if it cannot be read. Shift its events' times as if
    the prefill engine's step had ended at `ended` on this host's clock."""
    try:
        step = api.decode_outputs(packed)
        (raw,) = step.outputs
        (_,) = raw.new_token_ids
    except Exception:  # of many kinds, because outputs may contain tensors
        logger.warning("ignored an unreadable first token of a prefill engine", exc_info=True)
        return None
    for event in raw.events or ():
        event.timestamp += ended - step.timestamp
    return raw


def plain_body(max_tokens: int) -> list[bytes]:
    sampling = api.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    return api.encode_request(_request("", [], sampling))


def to_reject(kv: KvHandle) -> api.EngineCoreRequest:
    """Have the connector notify the prefill engine that `kv` will not be read."""
    return _for_connector("reject", pull_params(kv))


def to_read_ahead(kv: KvHandle, skip: int) -> api.EngineCoreRequest:
    """Have the connector read ahead; `skip`: see `kv.AHEAD`."""
    return _for_connector("ahead", pull_params(kv) | {"do_remote_prefill": False, AHEAD: skip})


def to_limit_chunk(tokens: int) -> api.EngineCoreRequest:
    """Have the connector limit the prompt tokens of a step."""
    return _for_connector("chunk", {CHUNK: tokens})


def _for_connector(kind: str, params: dict[str, Any]) -> api.EngineCoreRequest:
    """A message to the connector: a request with these parameters that vLLM aborts before it starts."""
    sampling = api.SamplingParams(max_tokens=1, extra_args={_KV: params})
    request = _request(f"{kind}-{secrets.token_hex(8)}", [0], sampling)
    request.abort_immediately = True
    return request


def _request(request_id: str, prompt: list[int], sampling: api.SamplingParams) -> api.EngineCoreRequest:
    return api.EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=clock.unix(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def pull_params(kv: KvHandle) -> dict[str, Any]:
    """The transfer parameters of a request that reads the KV at `kv`."""
    fields = {param: getattr(kv, name) for param, name in _HANDLE_FIELDS.items()}
    return kv.extra | {"do_remote_prefill": True} | fields


def handle_of(
    params: dict[str, Any],
    prompt_tokens: int,
    facts: EngineFacts,
    lease: float,
    adapter: int = 0,
) -> KvHandle | None:
    """The handle in the transfer parameters of a finished prefill; None if there is none."""
    try:
        fields = {name: params[param] for param, name in _HANDLE_FIELDS.items()}
        fields["block_ids"] = [list(group) for group in fields["block_ids"]]
    except (KeyError, TypeError):
        return None
    known = {"do_remote_prefill", "do_remote_decode"} | _HANDLE_FIELDS.keys()
    return KvHandle(
        **fields,
        num_tokens=prompt_tokens,
        block_size=facts.block_size,
        fingerprint=with_adapter(facts.fingerprint, adapter),
        lease=lease,
        extra={key: value for key, value in params.items() if key not in known},
    )


def scheduled_at(raw: api.EngineCoreOutput) -> float | None:
    """Monotonic time at which the request was first scheduled, after its KV was read."""
    times = [event.timestamp for event in raw.events or () if event.type is api.EngineCoreEventType.SCHEDULED]
    return times[0] if times else None


def computed_prompt_tokens(stats: api.SchedulerStats | None) -> int:
    details = stats.iteration_details if stats is not None else None
    return 0 if details is None else int(details.num_ctx_tokens)


def is_whole_prompt(params: Mapping[str, Any] | None, prompt: list[int]) -> bool:
    """Whether the prefill engine computed the whole prompt. With some models (Mamba) and kinds of speculative decoding
    the decode engine computes the prompt's end, and the prefill engine's token is not the request's first."""
    return params is not None and params.get("remote_num_tokens") == len(prompt)


def transfers_of(moved: Mapping[str, Any]) -> Transfers:
    """One Read for each request, whose parts several ranks read concurrently."""
    reads: dict[str, Read] = {}
    for request, source, seconds, size in moved.get(READS, ()):
        before = reads.get(request, Read(source, 0.0, 0))
        reads[request] = Read(source, max(seconds, before.seconds), size + before.bytes)
    return Transfers(
        list(reads.values()), sum(moved["num_failed_transfers"]) + sum(moved["num_failed_handshakes"])
    )


def _sanitized(request_id: str, prompt: list[int], body: list[bytes]) -> api.EngineCoreRequest:
    """The request in `body` with our id and prompt, without transfer parameters: with them a client could read other
    clients' KV, or kill the engine."""
    request = read_body(body)
    if not prompt:
        raise ProtocolError("the prompt is empty")
    request.request_id = request_id
    request.prompt_token_ids = prompt
    request.client_index = 0
    request.data_parallel_rank = None
    request.abort_immediately = False
    request.resumable = False
    _set_params(request.sampling_params, None)
    return request


def _set_params(sampling: api.SamplingParams, params: dict[str, Any] | None) -> None:
    extra = {
        key: value
        for key, value in (sampling.extra_args or {}).items()
        if key not in (_KV, "ec_transfer_params")
    }
    if params is not None:
        extra[_KV] = params
    sampling.extra_args = extra or None
