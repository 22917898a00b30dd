"""Compares what pdserve relies on in vLLM (`tools/vllm_surface.py`) with the installed vLLM."""

import dataclasses
import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.executor import multiproc_executor, uniproc_executor

from pdserve.config.engine_args.arguments import PATH, for_engine, to_argv
from pdserve.config.engine_args.installed import VLLM_VERSION
from pdserve.engine.vllm import api
from pdserve.kv import FAILED, RELEASED, STALLED, UNREACHABLE, connector
from tests.config.engine_args.test_arguments import ARGS
from tools.vllm_arguments import as_text, read_parser
from tools.vllm_diff import Release, imports
from tools.vllm_surface import CALLED, FIELDS, FUNCTIONS, MESSAGES, REPLACED, SOURCES

ADVICE = "changed in vLLM: adapt pdserve/engine or pdserve/kv, then tools/vllm_surface.py"
installed = Release("installed")


def resolve(dotted: str) -> Any:
    owner, _, name = dotted.rpartition(".")
    try:
        return getattr(import_module(owner), name)
    except ModuleNotFoundError:
        return getattr(resolve(owner), name)


def fields(struct: type) -> list[str]:
    if dataclasses.is_dataclass(struct):
        return [field.name for field in dataclasses.fields(struct)]
    return [field.name for field in msgspec.structs.fields(struct)]


def test_the_version_is_the_one_that_was_checked() -> None:
    assert api.VERSION == VLLM_VERSION, (
        f"vLLM {api.VERSION} is installed; run the engine tests, then set VLLM_VERSION"
    )


def test_our_list_has_the_arguments_of_the_installed_vllm() -> None:
    assert as_text(read_parser()) == PATH.read_text("utf-8"), (
        "vLLM's arguments changed: run python -m tools.vllm_arguments"
    )
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = vars(parser.parse_args(to_argv(for_engine(ARGS))))
    expected = {name.replace("-", "_"): value for name, value in for_engine(ARGS).items()}
    assert {name: parsed[name] for name in expected} == expected


@pytest.mark.parametrize("name", MESSAGES)
def test_the_fields_of_a_message_are_unchanged(name: str) -> None:
    """Checks the installed class, and its syntax tree, which `vllm_diff` compares."""
    assert fields(resolve(name)) == MESSAGES[name].split() == installed.fields(name), f"{name} {ADVICE}"


@pytest.mark.parametrize("name", FIELDS)
def test_used_fields_exist(name: str) -> None:
    assert set(FIELDS[name].split()) <= set(fields(resolve(name))), f"{name} {ADVICE}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_parameters_of_a_function_are_unchanged(name: str) -> None:
    parameters = list(inspect.signature(resolve(name)).parameters)
    assert parameters == FUNCTIONS[name].split() == installed.parameters(name), f"{name} {ADVICE}"


@pytest.mark.parametrize("name", CALLED)
def test_used_parameters_keep_their_order(name: str) -> None:
    used = CALLED[name].split()
    for parameters in (inspect.signature(resolve(name)).parameters, installed.parameters(name) or ()):
        assert [each for each in parameters if each in used] == used, f"{name} {ADVICE}"


@pytest.mark.parametrize("module", SOURCES)
def test_used_attributes_are_in_the_source(module: str) -> None:
    source = installed.source(module) or ""
    assert [text for text in SOURCES[module] if text not in source] == [], f"{module} {ADVICE}"


def test_every_name_that_pdserve_imports_or_replaces_is_there() -> None:
    names = [*imports(), *REPLACED]
    assert len(names) > 50
    assert [name for name in names if installed.find(name) is None] == [], ADVICE


@pytest.mark.parametrize("key", [STALLED, FAILED, RELEASED, UNREACHABLE])
def test_the_connectors_statistics_carry_our_own(key: str) -> None:
    stats = connector.PdserveConnector.build_kv_connector_stats()
    assert list(vars(stats)) == ["data"]
    assert stats.is_empty()
    stats.data[key].append("r1")
    assert not stats.is_empty()
    total = connector.PdserveConnector.build_kv_connector_stats()
    assert total.aggregate(stats).data[key] == ["r1"]
    assert total.clone_and_reset().data[key] == ["r1"]
    assert total.is_empty()


@pytest.mark.parametrize(
    ("ranks", "binding", "expected"),
    [
        (1, "nobind", "uni"),
        (2, "nobind", "mp"),
        (1, "0-3", "mp"),  # vLLM binds the threads of processes that it starts
        (1, None, "mp"),
    ],
)
def test_where_an_engine_on_the_cpu_computes(
    ranks: int, binding: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    if binding:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
    config = api.VllmConfig(
        parallel_config=ParallelConfig(tensor_parallel_size=ranks, distributed_executor_backend="mp")
    )
    api.compute_in_core(config)
    assert config.parallel_config.distributed_executor_backend == expected


def test_the_ranks_of_an_engine_meet_through_a_file_whose_name_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors = (uniproc_executor, multiproc_executor)
    for executor in executors:
        name = "get_file_store_init_method"
        monkeypatch.setattr(executor, name, getattr(executor, name))
    api.meet_in(f"{tmp_path}/ours_")
    methods = {executor.get_file_store_init_method() for executor in executors}
    assert len(methods) == 2
    assert {urlsplit(method).path.rpartition("_")[0] for method in methods} == {f"{tmp_path}/ours"}


def test_a_worker_starts_where_torch_may_not_compile() -> None:
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    subprocess.run([sys.executable, "-c", "import pdserve.engine.vllm.worker"], env=environment, check=True)


FAMILIES = Path(__file__).parent.parent / "plan/families"


@pytest.mark.parametrize(("family", "whole"), [("gemma-2-9b", True), ("Qwen2.5-7B", False)])
def test_transferred_kv_of_sliding_windows_is_kept_for_whole_prompts(family: str, whole: bool) -> None:
    config = api.engine_config(["--model", str(FAMILIES / family), "--skip-tokenizer-init"])
    api.move_whole_prompts(config)
    assert config.scheduler_config.disable_hybrid_kv_cache_manager == whole


def test_a_model_with_state_layers_cannot_be_transferred() -> None:
    config = api.engine_config(["--model", str(FAMILIES / "Jamba-1.5-Mini"), "--skip-tokenizer-init"])
    with pytest.raises(
        ValueError, match=r"^JambaForCausalLM has layers whose state .*: set remote-prefill: false"
    ):
        api.move_whole_prompts(config)
