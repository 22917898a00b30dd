"""The fingerprint on real files: what changes it, and what must not."""

import json
import os
import shutil
from pathlib import Path

import pytest

from pdserve.demo import MODEL_DIR as MODEL
from pdserve.engine.fingerprint import Fingerprint, fingerprint
from pdserve.util.errors import EngineDead

ARGS: dict[str, object] = {"block-size": 32, "dtype": "bfloat16"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def of(model: Path, **changes: object) -> str:
    return fingerprint(
        str(model), ARGS | {key.replace("_", "-"): value for key, value in changes.items()}, "0.32.0"
    )


def large(model: Path) -> Path:
    """Weights that are too large to be read as a whole: 40 tensors of a MiB of zeros."""
    size = 1 << 20
    tensors = {
        f"layers.{at}": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [at * size, (at + 1) * size]}
        for at in range(40)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    path = model / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 40 * size)
    return path


def put(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_copied_files_have_the_same_fingerprint(model: Path, tmp_path: Path) -> None:
    before = of(model)
    copy = Path(shutil.copytree(model, tmp_path / "on another host" / "m"))
    os.utime(copy / "config.json", (0, 0))
    (copy / "README.md").write_text("not read")
    (copy / ".cache").mkdir()
    (copy / "original").mkdir()
    (copy / "original" / "consolidated.pth").write_bytes(b"x")
    (copy / "pytorch_model.bin").write_bytes(b"not read where there is safetensors")
    assert of(copy) == before
    assert of(model) == before


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_a_changed_byte_of_a_small_file_changes_the_fingerprint(model: Path, name: str) -> None:
    before = of(model)
    middle = (model / name).stat().st_size // 2
    put(model / name, middle, bytes([(model / name).read_bytes()[middle] ^ 1]))
    assert len({before, changed := of(model)}) == 2
    (model / "model-00002.safetensors").write_bytes(b"x")
    assert of(model) not in (before, changed), "a further file of weights"


@pytest.mark.parametrize("tensor", [0, 17, 39])
def test_any_tensor_of_large_weights_changes_the_fingerprint(model: Path, tensor: int) -> None:
    path = large(model)
    before = of(model)
    data = path.stat().st_size - 40 * (1 << 20)
    put(path, data + tensor * (1 << 20), b"\x01" * (1 << 20))
    assert of(model) != before


def test_large_weights_of_another_format_change_the_fingerprint(model: Path) -> None:
    (model / "model.safetensors").unlink()
    path = model / "pytorch_model.bin"
    path.touch()
    os.truncate(path, 64 << 20)
    before = of(model)
    put(path, 30 << 20, b"\x01" * (4 << 20))
    assert of(model) != before


def test_a_file_without_a_safetensors_header_is_no_error(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(b"\xff" * (5 << 20))
    before = of(model)
    path.write_bytes((16).to_bytes(8, "little") + b"not json" * (1 << 20))
    assert of(model) != before


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 64},
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"hf_overrides": {"rope_theta": 1}},
        {"load_format": "dummy"},
        {"hf_overrides": {"rope_parameters": {"rope_type": "longrope"}}, "max_model_len": 100},
        {"speculative_config": {"method": "eagle", "model": "a/b"}},
        {"spec_model": "a/draft"},
    ],
)
def test_arguments_that_change_kv_change_the_fingerprint(model: Path, change: dict[str, object]) -> None:
    assert of(model, **change) != of(model)


def test_other_arguments_do_not_change_the_fingerprint(model: Path) -> None:
    before = of(model)
    assert (
        of(model, max_num_seqs=3, tensor_parallel_size=2, enforce_eager=True, kv_cache_dtype="auto") == before
    )
    assert of(model, additional_config={"sim": {}}, seed=4) == before
    assert of(model, speculative_config={"model": "ngram"}, spec_tokens=3) == before
    assert of(model, spec_method="ngram", speculative_config={"num_speculative_tokens": 3}) == before


def test_the_seed_of_dummy_weights_and_vllms_version_change_the_fingerprint(model: Path) -> None:
    dummy = of(model, load_format="dummy", seed=1)
    assert dummy != of(model, load_format="dummy", seed=2)
    assert fingerprint(str(model), ARGS, "0.33.0") != of(model)


@pytest.mark.parametrize(
    ("argument", "file"), [("tokenizer", "tokenizer.json"), ("hf_config_path", "config.json")]
)
def test_files_of_another_folder_count(model: Path, tmp_path: Path, argument: str, file: str) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    before = of(model, **{argument: str(other)})
    (other / file).write_text("{}")
    assert of(model, **{argument: str(other)}) != before


async def test_files_that_change_while_they_are_loaded_are_an_error(model: Path) -> None:
    loading = Fingerprint(str(model), ARGS, "0.32.0")
    await loading.before()
    assert await loading.after() == of(model)
    (model / "config.json").write_text("{}")
    with pytest.raises(EngineDead, match="changed while they were loaded"):
        await loading.after()


async def test_a_hub_model_is_read_when_it_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    loading = Fingerprint("org/model", ARGS, "0.32.0")
    await loading.before()
    cache = tmp_path / "models--org--model"
    for commit in ("aaa", "bbb"):
        shutil.copytree(MODEL, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("aaa")
    assert await loading.after() == of(Path(MODEL))
    await loading.before()
    (cache / "refs" / "main").write_text("bbb")
    with pytest.raises(EngineDead):
        await loading.after()
