"""The frontend's use of vLLM 0.32: its API server's app, AsyncLLM on our engine core, and the encoding of requests.

Only this folder imports vLLM in the frontend. `tools/vllm_surface.py` lists every private part in use, and
`tests/frontend/vllm/test_api_server.py` names what moved when vLLM changes. Importing this module takes 6 to 7 seconds
of CPU: do it late, in a thread.
"""

import asyncio
import logging
import threading
from argparse import ArgumentError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache, partial
from http import HTTPStatus
from operator import length_hint
from typing import Any, cast

import msgspec
import vllm.envs
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.parser import DelegatingParser
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.executor import Executor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import IterationStats, PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from pdserve.frontend.edge.deltas import DeltaStream
from pdserve.frontend.vllm.images import name_images_by_content
from pdserve.frontend.vllm.openapi import describe
from pdserve.frontend.vllm.refusals import fatal_grammar
from pdserve.frontend.vllm.side_loop import keep_prompt_logprobs, tokenize_short_prompts_inline
from pdserve.frontend.vllm.stream_errors import report_errors

__all__ = [
    "AsyncLLM", "EngineCoreClient", "EngineCoreOutput", "EngineCoreOutputs", "EngineCoreRequest", "FinishReason",
    "PrefillStats", "RequestOutputKind", "SamplingParams",
]  # fmt: skip

logger = logging.getLogger(__name__)

VERSION: str = vllm.__version__
vllm.envs.VLLM_ENABLE_RESPONSES_API_STORE = False  # stored responses would stay in this one process for ever

RECORD_EVERY = 0.25
"""Seconds between two updates of vLLM's step metrics: recording many steps at once costs a third as much CPU."""

_encoder = MsgpackEncoder()
_decoder = MsgpackDecoder(EngineCoreOutputs)
_constructing = threading.Lock()


# ── messages ───────────────────────────────────────────────────────────────────────────────────────────


class Unencodable(ValueError):
    """A request that msgpack cannot encode: an integer over 64 bits, text that is not UTF-8. The message names the
    field."""


def encode_request(request: EngineCoreRequest) -> list[bytes]:
    """Raises Unencodable."""
    try:
        return [bytes(part) for part in _encoder.encode(request)]
    except Exception as error:
        where = _refused_part(request).removeprefix("sampling_params.") or "the request"
        raise Unencodable(f"{where} cannot be served: {error}") from error


def _refused_part(value: object) -> str:
    """Return the path of the innermost part that the encoder refuses."""
    path = ""
    while (found := next(filter(_is_refused, _parts(value)), None)) is not None:
        path, value = path + found[0], found[1]
    return path.removeprefix(".")


def _is_refused(part: tuple[str, object]) -> bool:
    try:
        _encoder.encode(part[1])
    except Exception:
        return True
    return False


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f".{name}", part) for name, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    elif isinstance(value, msgspec.Struct):
        yield from ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    elif is_dataclass(value):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in fields(value))


def decode_outputs(body: Sequence[bytes]) -> EngineCoreOutputs:
    """Raises any of the decoder's errors for bytes that are not EngineCoreOutputs."""
    return _decoder.decode(body)


def in_our_time(output: EngineCoreOutput, offset: float) -> None:
    """Add `offset` to the times in the output, so that they fit this host's clock. vLLM's metrics subtract times, and
    after a migration these come from two hosts."""
    for event in output.events or ():
        event.timestamp += offset


def count_prefix_hit(stats: PrefillStats, remote_hit: int, block_size: int) -> None:
    """Set `cached_tokens` of the usage to the larger of two prefix hits: the decode worker's and the prefill worker's
    (`remote_hit`). Tokens that a prefill worker computed for this request count as written into a cache."""
    stats.num_cached_tokens = min(max(stats.num_local_cached_tokens, remote_hit), stats.num_prompt_tokens)
    if stats.num_external_cached_tokens and block_size:
        whole = stats.num_prompt_tokens // block_size * block_size
        stats.num_cache_creation_tokens = max(0, whole - stats.num_cached_tokens)


def drop_tokens(output: EngineCoreOutput, count: int) -> None:
    """Remove the first `count` tokens from the output, with their logprobs and sampling mask."""
    kept = len(output.new_token_ids) - count
    output.new_token_ids = output.new_token_ids[count:]
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(count, kept) if kept else None
    if output.new_sampling_mask is not None:
        output.new_sampling_mask = output.new_sampling_mask.slice_request(count, kept) if kept else None


def with_params(request: EngineCoreRequest, **changes: Any) -> EngineCoreRequest:
    """Return a copy with changed sampling parameters; AsyncLLM keeps the original."""
    request = copy(request)
    request.sampling_params = params = copy(request.sampling_params)
    for name, value in changes.items():
        setattr(params, name, value)
    return request


# ── the engine client ──────────────────────────────────────────────────────────────────────────────────


def parse_args(argv: list[str]) -> Namespace:
    """Parse vLLM's own `serve` arguments. Raises ValueError when argparse would exit."""
    parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
    parser.error = _raise_usage
    try:
        args = parser.parse_args(argv)
        validate_parsed_serve_args(args)
    except (ArgumentError, VLLMError, TypeError) as error:
        raise ValueError(str(error)) from error
    return cast(Namespace, args)


def _raise_usage(message: str) -> None:
    raise ValueError(message)


def make_engine(args: Namespace, core: EngineCoreClient, registry: CollectorRegistry) -> AsyncLLM:
    """Make an AsyncLLM whose engine core is `core`; it takes a second to read tokenizer and config. Its metrics go to
    `registry`, because in the default registry each model would unregister the metrics of the one before. Raises
    ValueError or OSError for a model folder or arguments that vLLM cannot use."""
    try:
        config = _config_without_engine(args)
    except VLLMError as error:
        raise ValueError(str(error)) from error
    make = EngineCoreClient.__dict__["make_async_mp_client"]
    with _constructing:
        EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: core)
        try:
            engine = AsyncLLM(
                config,
                Executor.get_class(config),
                log_stats=False,
                log_requests=False,
                stat_loggers=[_stat_logger(registry)],
            )
        finally:
            EngineCoreClient.make_async_mp_client = make
            unregister_vllm_metrics()
    _refuse_fatal_grammars(engine.input_processor)
    tokenize_short_prompts_inline(engine.renderer)
    name_images_by_content(engine.renderer)
    vllm.envs.enable_envs_cache()  # vLLM's metrics read the environment for each token
    return engine


def _refuse_fatal_grammars(inputs: InputProcessor) -> None:
    """Refuse grammars that kill the process. Wraps vLLM's validation of parameters, because all schemas pass through
    it."""
    validate = inputs._validate_params

    def checked(params: object, *rest: Any) -> bool | None:
        if isinstance(params, SamplingParams) and (found := fatal_grammar(params)):
            raise VLLMValidationError(found[1], parameter=found[0])
        try:
            return cast(bool | None, validate(params, *rest))
        except BaseException as error:
            # pyo3's PanicException, from a compiler in Rust, is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise VLLMValidationError("it cannot be compiled", parameter="structured_outputs") from error

    inputs._validate_params = checked


def _config_without_engine(args: Namespace) -> VllmConfig:
    """Configure vLLM without an engine, as its render server does."""
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    engine_args._set_default_reasoning_config_args()  # needed to check thinking_token_budget
    model = engine_args.create_model_config()
    model.quantization = None  # only workers have kernels
    vllm.envs.VLLM_CPU_KVCACHE_SPACE = 0  # no KV cache, and no warning about its size
    return VllmConfig(
        model_config=model,
        logging_config=engine_args.create_logging_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
        reasoning_config=engine_args.reasoning_config,
    )


def _stat_logger(registry: CollectorRegistry) -> type:
    metrics = {
        "_gauge_cls": staticmethod(partial(Gauge, registry=registry)),
        "_counter_cls": staticmethod(partial(Counter, registry=registry)),
        "_histogram_cls": staticmethod(partial(Histogram, registry=registry)),
    }
    return type("ModelStatLogger", (PrometheusStatLogger,), metrics)


def fail_request(engine: AsyncLLM, request_id: str, message: str, status: int) -> list[str]:
    """End all engine-core requests of an HTTP request (n > 1) with this error for the client. Returns their ids; empty
    if the request is already over."""
    processor = engine.output_processor
    state = processor.request_states.get(request_id)
    if state is None:
        return []
    owner = request_id if state.parent_req is None else state.parent_req.request_id
    ended: list[str] = processor.abort_requests([owner], internal=True)
    state.queue.put(GracefulHTTPError(message, HTTPStatus(status)))
    return ended


class OutputHandler:
    """Replaces AsyncLLM's output task by a plain call, which saves two event loop turns per step."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._processor = engine.output_processor
        self._metrics = engine.logger_manager
        self._unrecorded: list[IterationStats] = []

    def process(self, outputs: EngineCoreOutputs) -> list[str]:
        """Hand one engine step's outputs to their requests. Returns the ids of requests that the engine must abort,
        because they ended by a stop string or an error. An error fails only the request of its output."""
        stats, left, over = IterationStats(), iter(outputs.outputs), []
        for output in outputs.outputs:
            if output.new_prompt_logprobs_tensors is not None:
                keep_prompt_logprobs(self._processor, output)
        while length_hint(left):
            try:
                over += self._processor.process_outputs(left, outputs.timestamp, stats).reqs_to_abort
            except Exception:
                logger.exception("cannot process an output; failing its request")
                over += self._fail_last(outputs.outputs[: len(outputs.outputs) - length_hint(left)])
        if not self._unrecorded:
            asyncio.get_running_loop().call_later(RECORD_EVERY, self._record)
        self._unrecorded.append(stats)
        return over

    def _fail_last(self, taken: Sequence[EngineCoreOutput]) -> set[str]:
        """Fail the request of the last output that was taken. Return the ids of this request, of its siblings (n > 1),
        and of the earlier requests that are over: the error lost the list of those ended by a stop string."""
        failed = fail_request(self._engine, taken[-1].request_id, "internal error in the frontend", 500)
        running = self._processor.request_states
        return {*failed, *(output.request_id for output in taken if output.request_id not in running)}

    def _record(self) -> None:
        unrecorded, self._unrecorded = self._unrecorded, []
        for stats in unrecorded:
            self._metrics.record(scheduler_stats=None, iteration_stats=stats)


def stream_deltas(engine: AsyncLLM, request_id: str, deltas: DeltaStream, empty: bool) -> None:
    """Let `deltas` write the text of this request's outputs while `deltas` is ready; vLLM's app gets the other outputs.
    The app's next output includes the token ids of the written text, because the app counts tokens. `empty`: the app
    makes chunks of outputs without text, too, such as half of a character.

    Wraps `make_request_output` of vLLM's private `RequestState`, and reads its queue and detokenizer."""
    state = engine.output_processor.request_states[request_id]
    if state.stream_interval > 1:
        return
    make, queue, detokenizer = state.make_request_output, state.queue, state.detokenizer
    written: list[int] = []

    def makes_chunk(output: RequestOutput | None) -> bool:
        return output is not None and (empty or output.finished or output.outputs[0].text != "")

    def make_request_output(
        new_token_ids: list[int],
        pooling_output: None,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        *rest: Any,
        **options: Any,
    ) -> RequestOutput | None:
        if finish_reason is None and queue.output is None and deltas.ready():
            text = detokenizer.get_next_output_text(False, True)
            if text or empty:
                deltas.write(text)
            written.extend(new_token_ids)
            return None
        if finish_reason is not None:
            # break the reference cycle, which would keep the prompt until a garbage collection
            vars(state).pop("make_request_output", None)
        new_token_ids = [*written, *new_token_ids]
        written.clear()
        output = make(new_token_ids, pooling_output, finish_reason, stop_reason, *rest, **options)
        if makes_chunk(output) and not makes_chunk(queue.output):  # else the queue merges both
            deltas.passed()
        return output

    state.make_request_output = make_request_output


# ── the HTTP app ───────────────────────────────────────────────────────────────────────────────────────


async def make_app(
    engine: AsyncLLM, args: Namespace, tasks: Sequence[str]
) -> tuple[ASGIApp, dict[str, bool], OpenAIServingModels]:
    """Make vLLM's own app on this engine. Returns it with the routes of `_plain_paths` and with its list of model
    names.

    The app has no middleware, which would cost time on every chunk; the frontend replaces it. Raises ValueError for
    parsers that do not fit the model."""
    app = build_app(args, tuple(tasks), engine.model_config)
    app.user_middleware = []
    document = app.openapi
    app.openapi = cache(lambda: describe(document()))
    app.middleware_stack = FastAPI.build_middleware_stack(app)  # the app's own method also adds SageMaker's
    try:
        await init_app_state(engine, app.state, args, tuple(tasks))
    except TypeError as error:  # vLLM's ParserManager raises it
        raise ValueError(str(error)) from error
    return report_errors(app), _plain_paths(app, args), app.state.openai_serving_models


def _plain_paths(app: FastAPI, args: Namespace) -> dict[str, bool]:
    """Return the routes on which chunks of a plain request differ only in their text (`frontend/edge/deltas.py`), and
    for each whether outputs without text have chunks. Chats are left out if a parser reads their text. vLLM's older
    tool parsers do so only if the request has tools."""
    if args.enable_force_include_usage or args.enable_log_outputs or args.sse_keep_alive_interval:
        return {}
    completions, chats = {"/v1/completions": True}, "/v1/chat/completions"
    chat = app.state.openai_serving_chat
    if chat is None or type(chat) is not OpenAIServingChat:
        return completions
    if (parser := chat.parser_cls) is None:
        return {**completions, chats: True}
    only_tools = parser.__bases__ == (DelegatingParser,) and parser.reasoning_parser_cls is None
    reads_text = not only_tools or parser.tool_parser_cls.engine_based_streaming
    return completions if reads_text else {**completions, chats: False}
