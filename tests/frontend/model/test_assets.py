from pathlib import Path

import pytest

from pdserve.errors import Unavailable
from pdserve.frontend.model.assets import model_folder
from pdserve.messages import ModelCard
from pdserve.queue.base import BlobStore
from tests.queue.test_archives import tar_of


class Blobs(BlobStore):
    def __init__(self, **blobs: bytes) -> None:
        self.blobs = blobs

    async def put(self, name: str, data: bytes) -> None:
        self.blobs[name] = data

    async def get(self, name: str) -> bytes:
        return self.blobs[name]


def card(model: str, blob: str = "") -> ModelCard:
    return ModelCard("m", model, blob=blob)


def files(folder: str) -> dict[str, bytes]:
    found = [one for one in Path(folder).rglob("*") if one.is_file()]
    return {str(one.relative_to(folder)): one.read_bytes() for one in found}


async def test_folder_on_this_host(tmp_path: Path) -> None:
    assert await model_folder(card(str(tmp_path)), Blobs(), tmp_path) == str(tmp_path)


async def test_hub_id(tmp_path: Path) -> None:
    assert await model_folder(card("Qwen/Qwen3-8B"), Blobs(), tmp_path) == "Qwen/Qwen3-8B"


async def test_from_the_object_store(tmp_path: Path) -> None:
    blobs = Blobs(b=tar_of(**{"config.json": b"{}", "sub/a.txt": b"a"}))
    folder = await model_folder(card("/elsewhere/model", "b"), blobs, tmp_path)
    assert files(folder) == {"config.json": b"{}", "sub/a.txt": b"a"}
    assert await model_folder(card("/elsewhere/model", "b"), blobs, tmp_path) == folder
    assert len(files(str(tmp_path))) == 2


@pytest.mark.parametrize(("blob", "part"), [("", "uploaded no archive"), ("gone", "gone")])
async def test_nowhere(tmp_path: Path, blob: str, part: str) -> None:
    with pytest.raises(Unavailable, match=part):
        await model_folder(card("/elsewhere/model", blob), Blobs(), tmp_path)
