"""From a model card to vLLM's app: the model's folder on this host, and the arguments."""

from pathlib import Path

import pytest
from prometheus_client import Histogram

from pdserve.contract.records import Instance, ModelCard, Role
from pdserve.frontend.model import ModelContext
from pdserve.frontend.model.processor import ModelMetrics, frontend_argv, model_folder
from pdserve.frontend.vllm.api_server import parse_args
from pdserve.stream.archives import archive_name
from pdserve.stream.tcp import TcpStreamClient
from pdserve.util.errors import Unavailable
from tests.frontend.model.echo import EchoWorker
from tests.stream.test_archives import tar_of

ARCHIVE = tar_of(**{"config.json": b"{}", "sub/a.txt": b"a" * 1000})


def card(model: str, blob: str = "") -> ModelCard:
    return ModelCard("m", model, blob=blob)


def files(folder: str) -> dict[str, bytes]:
    found = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


async def folder_of(card: ModelCard, state: Path, *workers: Instance) -> str:
    context = ModelContext(lambda address: TcpStreamClient(address, "frontend-0"), state, "round-robin", 1.0)
    return await model_folder(card, context, lambda: [*workers])


async def test_a_folder_on_this_host_and_a_hub_id_stay_as_they_are(tmp_path: Path) -> None:
    for model in (str(tmp_path), "Qwen/Qwen3-8B"):
        assert await folder_of(card(model), tmp_path) == model


async def test_a_folder_is_fetched_from_a_worker_once(tmp_path: Path) -> None:
    there = card("/elsewhere/model", archive_name(ARCHIVE))
    unreachable = Instance("decode-9", Role.DECODE, address="tcp://127.0.0.1:1")
    async with EchoWorker("decode-0") as other, EchoWorker("decode-1") as worker:
        other.archive, worker.archive = b"of another model", ARCHIVE
        folder = await folder_of(there, tmp_path, unreachable, other.instance, worker.instance)
    assert files(folder) == {"config.json": b"{}", "sub/a.txt": b"a" * 1000}
    assert await folder_of(there, tmp_path) == folder, "kept, so no worker is asked"
    assert len(files(str(tmp_path))) == 2


@pytest.mark.parametrize(
    ("blob", "part"), [("", "has no archive"), ("abc", "no worker sends its archive abc")]
)
async def test_an_unsent_folder_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blob: str, part: str
) -> None:
    monkeypatch.setattr("pdserve.frontend.model.processor.FETCH_TIMEOUT", 0.1)
    async with EchoWorker("decode-0") as worker:
        with pytest.raises(Unavailable, match=part):
            await folder_of(card("/elsewhere/model", blob), tmp_path, worker.instance)


def argv(**engine_args: object) -> list[str]:
    named = {name.replace("_", "-"): value for name, value in engine_args.items()}
    card = ModelCard("served", "/there", engine_args=named, max_model_len=2048)
    return frontend_argv(card, "/here")


OF_WORKERS = {
    "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "gpu_memory_utilization": 0.9, "kv_cache_dtype": "fp8",
    "block_size": 64, "kv_transfer_config": {"kv_connector": "NixlConnector"}, "additional_config": {"a": 1},
    "max_num_seqs": 20, "max_num_batched_tokens": 512, "max_model_len": 10240, "enforce_eager": True,
    "quantization": "awq", "load_format": "dummy", "enable_prefix_caching": True, "compilation_config": {"level": 3},
    "speculative_config": {"method": "ngram"}, "spec_tokens": 3,
}  # fmt: skip
OF_FRONTENDS = {
    "tokenizer_mode": "slow",
    "tool_call_parser": "hermes",
    "enable_auto_tool_choice": True,
    "chat_template": "{{ x }}",
}


def test_only_arguments_that_matter_to_a_frontend_are_passed_on() -> None:
    assert argv(**OF_WORKERS) == argv()
    args = vars(parse_args(argv(**OF_FRONTENDS)))
    assert {name: args[name] for name in OF_FRONTENDS} == OF_FRONTENDS
    assert (args["model"], args["served_model_name"], args["max_model_len"]) == ("/here", ["served"], 2048)


def test_each_request_has_its_whole_images_whatever_the_file_sets() -> None:
    """vLLM's processor cache would omit images that were sent before, even if to another engine."""
    for engine_args in ({}, {"mm_processor_cache_gb": 4}):
        assert parse_args(argv(**engine_args)).mm_processor_cache_gb == 0


def test_bad_arguments_raise_an_error_instead_of_exiting() -> None:
    with pytest.raises(ValueError, match="tokenizer-mode"):
        parse_args([*argv(), "--tokenizer-mode"])
    with pytest.raises(ValueError, match="nowhere"):
        parse_args(argv(chat_template="nowhere.jinja"))


def test_a_model_has_each_series_once_while_its_card_changes() -> None:
    metrics = ModelMetrics()
    with metrics.model() as old, metrics.model() as new:
        for registry, seconds in ((old, (1.0, 3.0)), (new, (1.0,))):
            series = Histogram("vllm:s", "x", ["model_name"], buckets=[2.0], registry=registry)
            for each in seconds:
                series.labels("demo").observe(each)
        (metric,) = metrics.collect()
    samples = [each for each in metric.samples if not each.name.endswith("_created")]
    values = [(each.name.removeprefix("vllm:s_"), each.value) for each in samples]
    assert values == [("bucket", 2.0), ("bucket", 3.0), ("count", 3.0), ("sum", 5.0)]
