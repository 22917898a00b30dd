"""What pdserve.frontend.model uses of vLLM, name by name: an upgrade that moves one of them fails here and says
which."""

import inspect
import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import vllm.envs
from vllm.v1.metrics.stats import PrefillStats

from pdserve.frontend.model import ModelContext, vllm_api
from pdserve.stream import connect
from pdserve.stream.base import StreamClient
from tests.frontend.conftest import NoBlobs, card

# Signatures we call or are called with: at least these parameters, in this order.
SIGNATURES = {
    "vllm.v1.engine.async_llm:AsyncLLM.__init__": [
        "self", "vllm_config", "executor_class", "log_stats", "log_requests", "stat_loggers",
    ],
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown": ["self", "timeout"],
    "vllm.v1.engine.core_client:EngineCoreClient.make_async_mp_client": [
        "vllm_config", "executor_class", "renderer",
    ],
    "vllm.v1.engine.output_processor:OutputProcessor.abort_requests": ["self", "request_ids", "internal"],
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs": [
        "self", "engine_core_outputs", "engine_core_timestamp", "iteration_stats",
    ],
    "vllm.v1.engine.output_processor:RequestOutputCollector.put": ["self", "output"],
    "vllm.v1.engine.output_processor:RequestState.make_request_output": [
        "self", "new_token_ids", "pooling_output", "finish_reason", "stop_reason", "kv_transfer_params",
        "ec_transfer_params", "error",
    ],
    "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.get_next_output_text": ["self", "finished", "delta"],
    "vllm.v1.metrics.loggers:StatLoggerManager.record": ["self", "scheduler_stats", "iteration_stats"],
    "vllm.v1.metrics.stats:IterationStats.__init__": ["self"],
    "vllm.renderers.base:BaseRenderer._tokenize_prompt": ["self", "prompt", "params"],
    "vllm.v1.engine.output_processor:RequestState.__init__": ["self", "request_id", "parent_req", "queue"],
    "vllm.entrypoints.launchers.app:build_app": ["args", "supported_tasks", "model_config"],
    "vllm.entrypoints.launchers.api_server.app_state:init_app_state": [
        "engine_client", "state", "args", "supported_tasks",
    ],
    "vllm.entrypoints.launchers.cli_args:make_arg_parser": ["parser"],
    "vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args": ["args"],
    "vllm.engine.arg_utils:AsyncEngineArgs.from_cli_args": ["args"],
    "vllm.engine.arg_utils:AsyncEngineArgs.create_model_config": ["self"],
    "vllm.engine.arg_utils:AsyncEngineArgs.create_logging_config": ["self"],
    "vllm.engine.arg_utils:AsyncEngineArgs.create_structured_outputs_config": ["self"],
    "vllm.engine.arg_utils:AsyncEngineArgs._set_default_reasoning_config_args": ["self"],
    "vllm.v1.executor:Executor.get_class": ["vllm_config"],
    "vllm.v1.metrics.loggers:PrometheusStatLogger.__init__": ["self", "vllm_config", "engine_indexes"],
    "vllm.v1.metrics.prometheus:unregister_vllm_metrics": [],
    "vllm.exceptions:GracefulHTTPError.__init__": ["self", "message", "http_status"],
    "vllm.v1.serial_utils:MsgpackEncoder.encode": ["self", "obj"],
    "vllm.v1.serial_utils:MsgpackDecoder.decode": ["self", "bufs"],
    "vllm.tool_parsers:ToolParserManager.import_tool_parser": ["plugin_path"],
    "vllm.reasoning:ReasoningParserManager.import_reasoning_parser": ["plugin_path"],
    "vllm.v1.engine.async_llm:AsyncLLM.generate": ["self", "prompt", "sampling_params", "request_id"],
    "vllm.v1.engine.input_processor:InputProcessor._validate_params": ["self", "params", "supported_tasks"],
    "vllm.v1.engine.logprobs:LogprobsProcessor.__init__": [
        "self", "tokenizer", "logprobs", "prompt_logprobs", "cumulative_logprob", "num_logprobs",
        "num_prompt_logprobs",
    ],
    "vllm.v1.engine.logprobs:LogprobsProcessor._update_prompt_logprobs": ["self", "prompt_logprobs_tensors"],
    "vllm.logprobs:create_prompt_logprobs": ["flat_logprobs"],
}  # fmt: skip

# Array-like structs: the order of the fields is the encoding.
FIELDS = {
    "vllm.v1.engine:EngineCoreRequest": [
        "request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params",
        "arrival_time", "lora_request", "cache_salt", "data_parallel_rank", "prompt_embeds",
        "prompt_is_token_ids", "client_index", "current_wave", "priority", "trace_headers", "resumable",
        "external_req_id", "reasoning_ended", "reasoning_parser_kwargs", "abort_immediately",
        "session_id", "kv_hints",
    ],
    "vllm.v1.engine:EngineCoreOutput": [
        "request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors", "pooling_output",
        "finish_reason", "stop_reason", "events", "kv_transfer_params", "ec_transfer_params",
        "trace_headers", "prefill_stats", "routed_experts", "num_nans_in_logits", "mm_cache_miss_hashes",
        "new_sampling_mask", "spec_decode_metrics", "prompt_token_id_logprobs",
    ],
    "vllm.v1.engine:EngineCoreOutputs": [
        "engine_index", "outputs", "scheduler_stats", "timestamp", "utility_output", "finished_requests",
        "wave_complete", "start_wave", "weight_version",
    ],
}  # fmt: skip

# Every sampling parameter: a new one may need a rule of its own in docs/migration.md.
SAMPLING = {
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "watermarking",
    "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens",
    "min_tokens", "logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start",
    "logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "stream_interval",
    "skip_clone", "output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids",
    "_watermarking_skipped", "structured_outputs", "logit_bias", "allowed_token_ids", "extra_args",
    "bad_words", "_bad_words_token_ids", "skip_reading_prefix_cache", "thinking_token_budget",
    "repetition_detection", "routed_experts_prompt_start", "trace_decode_token_ids",
}  # fmt: skip

# What AsyncLLM does with its engine core: a new use must be answered by RemoteCore, or be one that may fail.
CORE_USES = {
    "abort_requests_async", "add_request_async", "get_output_async", "get_supported_tasks_async",
    "shutdown", "engine_ranks_managed", "resources", "reset_mm_cache_async", "reset_prefix_cache_async",
    "is_sleeping_async", "is_scheduler_paused_async", "dp_engines_running", "get_kv_event_sources",
}  # fmt: skip
CORE_MAY_FAIL = {
    "add_lora_async", "collective_rpc_async", "commit_elastic_ep", "compute_weight_checksums_async",
    "get_status", "get_weight_version_async", "handle_fault", "list_loras_async",
    "pause_scheduler_async", "pin_lora_async", "prepare_elastic_ep", "profile_async",
    "release_kv_cache_memory_async", "remove_lora_async", "reset_encoder_cache_async",
    "resume_scheduler_async", "set_weight_version_async", "sleep_async", "wake_up_async",
}  # fmt: skip


def find(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        return attrgetter(path)(import_module(module))
    except (ImportError, AttributeError) as error:
        pytest.fail(f"vLLM {vllm_api.VERSION} moved {name}: {error}")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    found = [found for found in inspect.signature(find(name)).parameters if found in SIGNATURES[name]]
    assert found == SIGNATURES[name], f"vLLM {vllm_api.VERSION} changed the parameters of {name}"


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    found = [field.name for field in msgspec.structs.fields(find(name))]
    assert found == FIELDS[name], f"vLLM {vllm_api.VERSION} changed the fields of {name}"


def test_sampling_parameters() -> None:
    found = {field.name for field in msgspec.structs.fields(vllm_api.SamplingParams)}
    assert found == SAMPLING, f"vLLM {vllm_api.VERSION} has other sampling parameters: {found ^ SAMPLING}"
    assert isinstance(vllm_api.SamplingParams.bad_words_token_ids, property)


def test_finish_reasons() -> None:
    found = {reason.name: reason.value for reason in vllm_api.FinishReason}
    assert found == {"STOP": 0, "LENGTH": 1, "ABORT": 2, "ERROR": 3, "REPETITION": 4}


def test_uses_of_the_engine_core() -> None:
    source = inspect.getsource(vllm_api.AsyncLLM)
    found = set(re.findall(r"engine_core\.(\w+)", source)) - {"output_handler"}
    assert found == CORE_USES | CORE_MAY_FAIL, (
        f"vLLM {vllm_api.VERSION}: AsyncLLM uses its core otherwise: {found ^ (CORE_USES | CORE_MAY_FAIL)}"
    )


def test_remote_core_answers_all_uses(tmp_path: Path) -> None:
    from pdserve.frontend.model.core import RemoteCore

    def connected(address: str) -> StreamClient:
        return connect(address, "frontend-0")

    core = RemoteCore(card(), ModelContext(connected, NoBlobs(), tmp_path, "round-robin", 1.0))
    missing = {name for name in CORE_USES if not hasattr(core, name)}
    assert not missing


@pytest.mark.parametrize("name", ["request_states", "parent_requests"])
def test_output_processor_state(name: str) -> None:
    source = inspect.getsource(find("vllm.v1.engine.output_processor:OutputProcessor.__init__"))
    assert f"self.{name}" in source, f"vLLM {vllm_api.VERSION}: OutputProcessor has no {name}"


@pytest.mark.parametrize("name", ["_gauge_cls", "_counter_cls", "_histogram_cls"])
def test_stat_logger_hooks(name: str) -> None:
    assert hasattr(find("vllm.v1.metrics.loggers:PrometheusStatLogger"), name)


@pytest.mark.parametrize(
    ("local", "external", "elsewhere", "cached", "written"),
    [(0, 417, 0, 0, 416), (32, 385, 0, 32, 384), (0, 417, 64, 64, 352), (32, 0, 0, 32, 7), (0, 0, 0, 0, 7)],
)
def test_what_came_over_the_network_is_no_hit(
    local: int, external: int, elsewhere: int, cached: int, written: int
) -> None:
    stats = PrefillStats(417, 0, local + external, local, external, 7)
    vllm_api.count_prefix_hit(stats, elsewhere, 32)
    assert (stats.num_cached_tokens, stats.num_cache_creation_tokens) == (cached, written)


def test_the_store_of_responses_is_off_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    source = inspect.getsource(import_module("vllm.entrypoints.openai.responses.serving"))
    assert "self.enable_store = envs.VLLM_ENABLE_RESPONSES_API_STORE" in source
    assert vllm.envs.VLLM_ENABLE_RESPONSES_API_STORE is False
