"""What vLLM's frontend expects of its engine core, and of other parts that pdserve replaces. (Names that pdserve uses
of vLLM: tests/engine/test_vllm_api.py.)"""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
import vllm.envs
from vllm.v1.metrics.stats import PrefillStats

from pdserve.frontend.model import ModelContext
from pdserve.frontend.vllm import api_server
from pdserve.stream.tcp import TcpStreamClient
from tests.frontend.conftest import card

# AsyncLLM uses these members of its engine core. RemoteCore must have those of CORE_USES and may lack the others.
CORE_USES = {
    "abort_requests_async", "add_request_async", "get_output_async", "get_supported_tasks_async",
    "shutdown", "engine_ranks_managed", "resources", "get_kv_event_sources",
}  # fmt: skip
CORE_MAY_FAIL = {
    "add_lora_async", "collective_rpc_async", "commit_elastic_ep", "compute_weight_checksums_async",
    "dp_engines_running", "is_scheduler_paused_async", "is_sleeping_async", "reset_mm_cache_async",
    "reset_prefix_cache_async",
    "get_status", "get_weight_version_async", "handle_fault", "list_loras_async",
    "pause_scheduler_async", "pin_lora_async", "prepare_elastic_ep", "profile_async",
    "release_kv_cache_memory_async", "remove_lora_async", "reset_encoder_cache_async",
    "resume_scheduler_async", "set_weight_version_async", "sleep_async", "wake_up_async",
}  # fmt: skip


def test_the_values_of_finish_reasons() -> None:
    found = {reason.name: reason.value for reason in api_server.FinishReason}
    assert found == {"STOP": 0, "LENGTH": 1, "ABORT": 2, "ERROR": 3, "REPETITION": 4}


def test_async_llm_uses_only_known_members_of_its_engine_core() -> None:
    source = inspect.getsource(api_server.AsyncLLM)
    found = set(re.findall(r"engine_core\.(\w+)", source)) - {"output_handler"}
    assert found == CORE_USES | CORE_MAY_FAIL, (
        f"vLLM {api_server.VERSION}: AsyncLLM uses other members of its core: {found ^ (CORE_USES | CORE_MAY_FAIL)}"
    )


def test_remote_core_has_all_members_of_core_uses(tmp_path: Path) -> None:
    from pdserve.frontend.model.engine_core import RemoteCore

    def connected(address: str) -> TcpStreamClient:
        return TcpStreamClient(address, "frontend-0")

    core = RemoteCore(card(), ModelContext(connected, tmp_path, "round-robin", 1.0))
    missing = {name for name in CORE_USES if not hasattr(core, name)}
    assert not missing


@pytest.mark.parametrize(
    ("local", "external", "remote_hit", "cached", "written"),
    [(0, 417, 0, 0, 416), (32, 385, 0, 32, 384), (0, 417, 64, 64, 352), (32, 0, 0, 32, 7), (0, 0, 0, 0, 7)],
)
def test_the_larger_prefix_hit_counts_as_cached(
    local: int, external: int, remote_hit: int, cached: int, written: int
) -> None:
    stats = PrefillStats(417, 0, local + external, local, external, 7)
    api_server.count_prefix_hit(stats, remote_hit, 32)
    assert (stats.num_cached_tokens, stats.num_cache_creation_tokens) == (cached, written)


def test_the_store_of_responses_is_off_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    source = inspect.getsource(import_module("vllm.entrypoints.openai.responses.serving"))
    assert "self.enable_store = envs.VLLM_ENABLE_RESPONSES_API_STORE" in source
    assert vllm.envs.VLLM_ENABLE_RESPONSES_API_STORE is False
