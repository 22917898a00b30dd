"""A model's archive: what is in it, its name, and what is refused when it is unpacked."""

import asyncio
import io
import os
import tarfile
from pathlib import Path

import pytest

from pdserve.errors import Unavailable
from pdserve.queue import archives
from pdserve.queue.archives import StoredArchive, archive_name, pack_model, unpack
from pdserve.queue.memory import MemoryBlobs, MemoryBroker
from tests.conditions import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    (model / "templates").mkdir(parents=True)
    (model / ".cache").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "templates/tool.jinja", ".cache/junk"):
        (model / name).write_text(name)
    return model


def tar_of(**files: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


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


@pytest.mark.parametrize(
    "data",
    [b"no tar", b"", tar_of(**{"../evil": b"x"}), tar_of(a=b"x" * 5000)[:60]],
    ids=[
        "no tar",
        "empty",
        "path outside",
        "broken off",
    ],  # of their own bytes each process would make others
)
def test_bad_archives_leave_nothing(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(Unavailable):
        unpack(data, tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())
    assert not (tmp_path / "evil").exists()


def test_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_ARCHIVE", 10)
    with pytest.raises(Unavailable, match="too large"):
        unpack(tar_of(a=b"x" * 11), tmp_path / "models")


async def test_it_is_stored_under_its_name(folder: Path) -> None:
    blobs = MemoryBlobs(MemoryBroker())
    archive = StoredArchive(str(folder), blobs)
    await archive.make()
    assert archive_name(await blobs.get(archive.name)) == archive.name


async def test_a_hub_id_has_no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.queue.archives.CHECK", 0.01)
    broker = MemoryBroker()
    archive = StoredArchive("Qwen/Qwen3-0.6B", MemoryBlobs(broker))
    await archive.make()
    assert archive.name == ""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(archive.keep_stored(), 0.05)
    assert not broker.blobs


async def test_it_is_stored_when_nats_comes_late_and_when_nats_has_lost_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdserve.queue.archives.RETRY", 0.01)
    monkeypatch.setattr("pdserve.queue.archives.CHECK", 0.01)
    broker = MemoryBroker()
    await broker.down()
    archive = StoredArchive(str(folder), MemoryBlobs(broker))
    await archive.make()
    assert archive.name, "the card names it all the same"
    keeping = asyncio.create_task(archive.keep_stored())
    await asyncio.sleep(0.05)
    assert caplog.text.count("for now") == 1, "said once"
    await broker.up()
    await until(lambda: bool(broker.blobs))
    broker.blobs.clear()
    await until(lambda: bool(broker.blobs))
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
