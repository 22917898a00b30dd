import os
from pathlib import Path

import pytest

from pdserve.decode.archive import archive_name, pack_model
from pdserve.decode.worker import upload_model
from pdserve.processor.assets import unpack
from pdserve.queue.memory import MemoryBlobs, MemoryBroker


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    (model / "templates").mkdir(parents=True)
    (model / ".cache").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "templates/tool.jinja", ".cache/junk"):
        (model / name).write_text(name)
    return model


def test_everything_but_the_weights_arrives(folder: Path, tmp_path: Path) -> None:
    there = unpack(pack_model(folder), tmp_path / "there")
    names = sorted(str(path.relative_to(there)) for path in there.rglob("*") if path.is_file())
    assert names == ["config.json", "templates/tool.jinja", "tokenizer.json"]
    assert (there / "config.json").read_text() == "config.json"


def test_the_same_files_give_the_same_archive(folder: Path) -> None:
    before = pack_model(folder)
    os.utime(folder / "config.json", (1, 1))
    assert pack_model(folder) == before
    (folder / "config.json").write_text("other")
    assert archive_name(pack_model(folder)) != archive_name(before)


async def test_it_is_uploaded_under_its_name(folder: Path) -> None:
    blobs = MemoryBlobs(MemoryBroker())
    name = await upload_model(str(folder), blobs)
    assert archive_name(await blobs.get(name)) == name


async def test_a_hub_id_has_no_archive() -> None:
    assert await upload_model("Qwen/Qwen3-0.6B", MemoryBlobs(MemoryBroker())) == ""


async def test_without_nats_the_card_goes_out_without_it(folder: Path) -> None:
    broker = MemoryBroker()
    await broker.down()
    assert await upload_model(str(folder), MemoryBlobs(broker)) == ""
