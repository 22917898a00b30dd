"""An archive of a model's folder (without weights) that frontends on other hosts fetch from a decode worker over a
stream (docs/decisions/0053-archives-over-streams.md)."""

import asyncio
import gzip
import hashlib
import io
import logging
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from pdserve.contract.messages import ArchivePart, GetArchive
from pdserve.runtime.tasks import isolate_errors
from pdserve.stream.tcp import TcpStreamClient
from pdserve.util.errors import Unavailable

logger = logging.getLogger(__name__)

_WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".npz", ".tflite",
}  # fmt: skip
_MAX_FILE = 100 << 20
"""Largest archived file in bytes. The largest tokenizers have about 40 MB."""
MAX_ARCHIVE = 1 << 30
"""Largest size of an archive in bytes, both packed and unpacked."""
PART = 1 << 20
"""Each message has at most this many bytes of an archive."""
TOO_LARGE = "the model archive is too large to hold only tokenizer and configuration"


def pack_model(folder: Path) -> bytes:
    """Return the archive. Its bytes depend only on the files. It contains the folder's files and those one level down
    (chat templates), but no weights and no hidden folders."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for path in sorted([*folder.glob("*"), *folder.glob("[!.]*/*")]):
            if path.is_file() and path.suffix not in _WEIGHTS and path.stat().st_size <= _MAX_FILE:
                entry = tarfile.TarInfo(str(path.relative_to(folder)))
                data = path.read_bytes()
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def archive_name(archive: bytes) -> str:
    """Return the archive's digest, by which a frontend finds an earlier copy on its host."""
    return hashlib.sha256(archive).hexdigest()[:32]


class ModelArchive:
    """The archive of a decode worker's model."""

    def __init__(self, model: str) -> None:
        self.name = ""
        """empty for a hub id, which every host can load itself"""
        self._model = Path(model)
        self._data = b""

    async def make(self) -> None:
        if await asyncio.to_thread(self._model.is_dir):
            self._data = await asyncio.to_thread(pack_model, self._model)
            self.name = archive_name(self._data)

    async def send(self, send: Callable[[ArchivePart], Awaitable[None]]) -> None:
        """Answer a `GetArchive`."""
        with isolate_errors("model archive"):
            for start in range(0, len(self._data), PART):
                await send(ArchivePart(self._data[start : start + PART]))
            await send(ArchivePart())


async def fetch(worker: TcpStreamClient) -> bytes:
    """Return the archive of the worker's model. Raises PeerGone, and Unavailable if it is too large."""
    await worker.send(GetArchive())
    data = bytearray()
    async for message in worker.received():
        if isinstance(message, ArchivePart):
            data += message.data
            if len(data) > MAX_ARCHIVE:
                raise Unavailable(TOO_LARGE)
            if not message.data:
                break
    return bytes(data)


def unpack(archive: bytes, folder: Path) -> Path:
    """Unpack into `folder/<archive_name>` unless that exists. Raises Unavailable for an archive that is damaged, too
    large, or points outside of its folder."""
    folder = folder.expanduser()
    target = folder / archive_name(archive)
    if target.is_dir():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder))
    except OSError as error:
        raise Unavailable(f"cannot unpack the model archive: {error}") from error
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            if sum(member.size for member in tar) > MAX_ARCHIVE:
                raise Unavailable(TOO_LARGE)
            tar.extractall(fresh, filter="data")
        os.sync()  # write the files to disk before the folder gets its final name
        _move(fresh, target)
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise Unavailable(f"cannot unpack the model archive: {error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    logger.info("unpacked a model archive to %s", target)
    return target


def _move(fresh: Path, target: Path) -> None:
    try:
        fresh.rename(target)
    except OSError:  # another frontend process may have been faster
        if not target.is_dir():
            raise
