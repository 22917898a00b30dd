"""What moved in vLLM? Each line names something that `pdserve/engine/vllm/api.py` or the connector relies
on."""

import dataclasses
import inspect
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from vllm.config import ParallelConfig

from pdserve.config.host import VLLM_VERSION
from pdserve.engine.vllm import api
from pdserve.kv import FAILED, RELEASED, STALLED, UNREACHABLE, connector

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
"""imported after our connector, which provides NIXL to it"""
NixlBaseConnector = import_module(f"{NIXL}.connector").NixlBaseConnector
NixlBaseConnectorWorker = import_module(f"{NIXL}.base_worker").NixlBaseConnectorWorker
NixlPullConnectorScheduler = import_module(f"{NIXL}.pull_scheduler").NixlPullConnectorScheduler
NixlPullConnectorWorker = import_module(f"{NIXL}.pull_worker").NixlPullConnectorWorker
NixlKVConnectorStats = import_module(f"{NIXL}.stats").NixlKVConnectorStats

ADVICE = "moved in vLLM: read what became of it, adapt pdserve/engine or pdserve/kv, then this table"


def fields(struct: type) -> list[str]:
    if dataclasses.is_dataclass(struct):
        return [field.name for field in dataclasses.fields(struct)]
    return [field.name for field in msgspec.structs.fields(struct)]


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_version_is_the_one_that_was_read() -> None:
    assert api.VERSION == VLLM_VERSION, (
        f"vLLM {api.VERSION} is installed; run the engine tests, then set VLLM_VERSION"
    )


@pytest.mark.parametrize(
    ("struct", "expected"),
    [
        (
            api.EngineCoreRequest,
            "request_id prompt_token_ids mm_features sampling_params pooling_params arrival_time "
            "lora_request cache_salt data_parallel_rank prompt_embeds prompt_is_token_ids client_index "
            "current_wave priority trace_headers resumable external_req_id reasoning_ended "
            "reasoning_parser_kwargs abort_immediately session_id kv_hints",
        ),
        (
            api.EngineCoreOutput,
            "request_id new_token_ids new_logprobs new_prompt_logprobs_tensors pooling_output "
            "finish_reason stop_reason events kv_transfer_params ec_transfer_params trace_headers "
            "prefill_stats routed_experts num_nans_in_logits mm_cache_miss_hashes new_sampling_mask "
            "spec_decode_metrics prompt_token_id_logprobs",
        ),
        (
            api.EngineCoreOutputs,
            "engine_index outputs scheduler_stats timestamp utility_output finished_requests "
            "wave_complete start_wave weight_version",
        ),
        (api.KVEventBatch, "ts events data_parallel_rank"),
    ],
)
def test_a_messages_fields(struct: type, expected: str) -> None:
    assert fields(struct) == expected.split(), f"{struct.__name__} {ADVICE}"


@pytest.mark.parametrize(
    ("struct", "needed"),
    [
        (api.SchedulerStats, "num_running_reqs num_waiting_reqs num_skipped_waiting_reqs kv_cache_usage"),
        (api.SchedulerStats, "kv_connector_stats prefix_cache_stats"),
        (api.SamplingParams, "max_tokens temperature detokenize extra_args skip_reading_prefix_cache"),
        (api.BlockStored, "block_hashes parent_block_hash token_ids lora_name extra_keys group_idx"),
        (api.BlockRemoved, "block_hashes group_idx"),
    ],
)
def test_fields_that_are_used(struct: type, needed: str) -> None:
    assert set(needed.split()) <= set(fields(struct)), f"{struct.__name__} {ADVICE}"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (api.AsyncMPClient.add_request_async, "self request"),
        (api.AsyncMPClient.abort_requests_async, "self request_ids"),
        (api.AsyncMPClient.get_output_async, "self"),
        (api.AsyncMPClient.get_supported_tasks_async, "self"),
        (api.AsyncMPClient.reset_prefix_cache_async, "self reset_running_requests reset_connector"),
        (api.AsyncMPClient.shutdown, "self timeout"),
        (api.PrometheusStatLogger.record, "self scheduler_stats iteration_stats mm_cache_stats engine_idx"),
        (NixlBaseConnector.__init__, "self vllm_config role kv_cache_config"),
        (NixlPullConnectorScheduler.__init__, "self vllm_config engine_id kv_cache_config"),
        (NixlPullConnectorWorker.__init__, "self vllm_config engine_id kv_cache_config"),
        (NixlPullConnectorWorker._pop_done_transfers, "self transfers"),
        (NixlPullConnectorWorker._read_blocks_for_req, "self req_id meta"),
        (NixlPullConnectorWorker.get_transfer_results, "self"),
        (
            NixlPullConnectorWorker._handle_failed_transfer,
            "self req_id handle failed_req_ids record_failed_transfer",
        ),
        (NixlPullConnectorWorker._mark_remote_engine_invalid, "self engine_id now"),
    ],
)
def test_a_functions_parameters(function: object, expected: str) -> None:
    assert parameters(function) == expected.split(), f"{getattr(function, '__qualname__', function)} {ADVICE}"


def test_what_the_connector_reads_of_vllms() -> None:
    source = inspect.getsource(NixlBaseConnectorWorker) + inspect.getsource(NixlPullConnectorWorker)
    for name in (
        "self._recving_metadata",
        "self.block_len_per_layer",
        "self.xfer_stats",
        "local_physical_block_ids",
        "self._recv_failures",
        "blocks_expiry_time",
        "finished_sending",
    ):
        assert name in source, f"{name} {ADVICE}"
    assert fields(NixlKVConnectorStats) == ["data"]


def test_what_is_read_of_vllms_memory_profile() -> None:
    """Of its GPU worker, whose module is not imported here: it needs a GPU's libraries."""
    folder = Path(str(find_spec("vllm.v1.worker").submodule_search_locations[0]))  # type: ignore[union-attr, index]
    worker = (folder / "gpu_worker.py").read_text()
    assert "self.total_consumed = profile_result.total_consumed" in worker, f"total_consumed {ADVICE}"
    assert "self.peak_activation_memory = (" in worker, f"peak_activation_memory {ADVICE}"
    for runner in ("gpu_model_runner.py", "gpu/model_runner.py"):
        assert "self.model_memory_usage = m.consumed_memory" in (folder / runner).read_text(), ADVICE


@pytest.mark.parametrize("key", [STALLED, FAILED, RELEASED, UNREACHABLE])
def test_the_connectors_statistics_carry_our_own(key: str) -> None:
    stats = connector.PdserveConnector.build_kv_connector_stats()
    assert stats.is_empty()
    stats.data[key].append("r1")
    assert not stats.is_empty()
    total = connector.PdserveConnector.build_kv_connector_stats()
    assert total.aggregate(stats).data[key] == ["r1"]
    assert total.clone_and_reset().data[key] == ["r1"]
    assert total.is_empty()


@pytest.mark.parametrize(
    ("ranks", "binding", "backend", "expected"),
    [
        (1, "nobind", "mp", "uni"),
        (2, "nobind", "mp", "mp"),
        (1, "0-3", "mp", "mp"),  # vLLM binds the threads of processes that it starts
        (1, None, "mp", "mp"),
    ],
)
def test_where_an_engine_on_the_cpu_computes(
    ranks: int, binding: str | None, backend: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    if binding:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
    config = api.VllmConfig(
        parallel_config=ParallelConfig(tensor_parallel_size=ranks, distributed_executor_backend=backend)
    )
    api.compute_in_core(config)
    assert config.parallel_config.distributed_executor_backend == expected


def test_a_worker_starts_where_torch_may_not_compile() -> None:
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    subprocess.run([sys.executable, "-c", "import pdserve.engine.vllm.worker"], env=environment, check=True)
