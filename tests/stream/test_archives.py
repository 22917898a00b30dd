"""A model's archive: its files and name, how a frontend fetches it, and which archives it refuses."""

import asyncio
import io
import os
import random
import tarfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from pdserve.contract.messages import ArchivePart, GetArchive
from pdserve.stream import archives
from pdserve.stream.archives import ModelArchive, archive_name, fetch, pack_model, unpack
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer
from pdserve.util.errors import Unavailable


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


def test_all_files_but_weights_and_hidden_folders_arrive(folder: Path, tmp_path: Path) -> None:
    there = unpack(pack_model(folder), tmp_path / "there")
    names = sorted(str(path.relative_to(there)) for path in there.rglob("*") if path.is_file())
    assert names == ["config.json", "templates/tool.jinja", "tokenizer.json"]
    assert (there / "config.json").read_text() == "config.json"


def test_a_power_cut_leaves_no_incomplete_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a folder would be used as the model for ever."""
    synced: list[list[Path]] = []
    monkeypatch.setattr(os, "sync", lambda: synced.append(list((tmp_path / "there").glob("*/config.json"))))
    there = unpack(pack_model(folder), tmp_path / "there")
    ((before,),) = synced
    assert before.parent != there


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
        "a path outside the folder",
        "cut",
    ],  # ids from the bytes would differ between processes
)
def test_bad_archives_leave_nothing(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(Unavailable):
        unpack(data, tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())
    assert not (tmp_path / "evil").exists()


def test_an_archive_that_is_damaged_anywhere_is_refused_or_unpacked(tmp_path: Path) -> None:
    whole = tar_of(**{name: random.Random(name).randbytes(5000).hex().encode() for name in "ab"})
    for place in range(0, len(whole) - 8, 40):
        with suppress(Unavailable):
            unpack(whole[:place] + 8 * b"\xff" + whole[place + 8 :], tmp_path / "models")


def test_an_archive_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_ARCHIVE", 10)
    with pytest.raises(Unavailable, match="too large"):
        unpack(tar_of(a=b"x" * 11), tmp_path / "models")


async def test_an_archive_arrives_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "PART", 100)
    archive = ModelArchive(str(folder))
    await archive.make()
    whole = archive._data
    for size in (0, 1, 100, 250):
        archive._data = whole[:size]
        async with TcpStreamServer("127.0.0.1") as server, TcpStreamClient(server.address, "one") as client:
            fetching = asyncio.create_task(fetch(client))
            frontend, message = await anext(aiter(server.received()))
            assert message == GetArchive()
            await archive.send(partial(server.send, frontend))
            assert await fetching == archive._data


async def test_an_endless_archive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_ARCHIVE", 10)
    async with TcpStreamServer("127.0.0.1") as server, TcpStreamClient(server.address, "one") as client:
        fetching = asyncio.create_task(fetch(client))
        frontend, _ = await anext(aiter(server.received()))
        await server.send(frontend, ArchivePart(b"x" * 11))
        with pytest.raises(Unavailable, match="too large"):
            await fetching
