import asyncio
from pathlib import Path

import pytest

from pdserve.decode.archive import Archive
from pdserve.queue.archives import archive_name
from pdserve.queue.memory import MemoryBlobs, MemoryBroker
from tests.conditions import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text(name)
    return model


async def test_it_is_stored_under_its_name(folder: Path) -> None:
    blobs = MemoryBlobs(MemoryBroker())
    archive = Archive(str(folder), blobs)
    await archive.make()
    assert archive_name(await blobs.get(archive.name)) == archive.name


async def test_a_hub_id_has_no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.decode.archive.CHECK", 0.01)
    broker = MemoryBroker()
    archive = Archive("Qwen/Qwen3-0.6B", MemoryBlobs(broker))
    await archive.make()
    assert archive.name == ""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(archive.keep_stored(), 0.05)
    assert not broker.blobs


async def test_it_is_stored_when_nats_comes_late_and_when_nats_has_lost_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdserve.decode.archive.RETRY", 0.01)
    monkeypatch.setattr("pdserve.decode.archive.CHECK", 0.01)
    broker = MemoryBroker()
    await broker.down()
    archive = Archive(str(folder), MemoryBlobs(broker))
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
