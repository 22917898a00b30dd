"""A model's folder without its weights, as one archive in the blob store, for frontends on other hosts."""

import asyncio
import gzip
import hashlib
import io
import logging
import shutil
import tarfile
import tempfile
from pathlib import Path

from pdserve.errors import QueueUnavailable, Unavailable
from pdserve.queue.base import BlobStore

log = logging.getLogger(__name__)

_WEIGHTS = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".ckpt",
    ".npz",
    ".tflite",
}
_LARGEST = 100 << 20
"""bytes; larger files are left out. The largest tokenizers have some 40 MB"""
MAX_ARCHIVE = 1 << 30
"""bytes that an archive may unpack to: tokenizers and configs, never weights"""
RETRY, CHECK = 5.0, 60.0
"""seconds until an archive is stored again: while NATS is away, and while it is there"""


def pack_model(folder: Path) -> bytes:
    """Return the archive; the same files give the same bytes, whenever and wherever they are packed. It holds the
    folder's own files and those one level down (chat templates), but no hidden folders, which hold copies."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for path in sorted([*folder.glob("*"), *folder.glob("[!.]*/*")]):
            if path.is_file() and path.suffix not in _WEIGHTS and path.stat().st_size <= _LARGEST:
                entry = tarfile.TarInfo(str(path.relative_to(folder)))
                data = path.read_bytes()
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def archive_name(archive: bytes) -> str:
    """Return the archive's digest, so that the same files are stored once."""
    return hashlib.sha256(archive).hexdigest()[:32]


class StoredArchive:
    """A model's archive in NATS' object store; without `blobs` there is none. The model card may name it before it is
    stored: frontends that need it try again."""

    def __init__(self, model: str, blobs: BlobStore | None) -> None:
        self.name = ""
        """name in the store; empty for a hub id, which every host can load by itself"""
        self._model = Path(model)
        self._blobs = blobs
        self._data = b""
        self._missing = False

    async def make(self) -> None:
        """Pack the archive, and store it if NATS is there."""
        if self._blobs is not None and await asyncio.to_thread(self._model.is_dir):
            self._data = await asyncio.to_thread(pack_model, self._model)
            self.name = archive_name(self._data)
            await self._store(self._blobs)

    async def keep_stored(self) -> None:
        """Store it again and again, for ever: NATS may come late, or lose its data."""
        while True:
            await asyncio.sleep(RETRY if self._missing else CHECK)
            if self._blobs is not None and self.name:
                await self._store(self._blobs)

    async def _store(self, blobs: BlobStore) -> None:
        missed, self._missing = self._missing, False
        try:
            await blobs.put(self.name, self._data)
        except QueueUnavailable as error:
            self._missing = True
            if not missed:
                log.warning("frontends on other hosts will not find the tokenizer for now: %s", error)
            return
        if missed:
            log.info("frontends on other hosts will find the tokenizer: NATS is back")


def unpack(archive: bytes, folder: Path) -> Path:
    """Unpack into `folder/<archive_name>`, once: the same archive is found again. Raises Unavailable for an archive
    that is damaged, too large, or points outside of its own folder."""
    folder = folder.expanduser()
    target = folder / archive_name(archive)
    if target.is_dir():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder))
    except OSError as error:
        raise Unavailable(f"the model archive cannot be unpacked: {error}") from error
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            if sum(member.size for member in tar) > MAX_ARCHIVE:
                raise Unavailable("the model archive is too large to hold only tokenizer and configuration")
            tar.extractall(fresh, filter="data")
        _move(fresh, target)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise Unavailable(f"the model archive cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    log.info("unpacked a model archive to %s", target)
    return target


def _move(fresh: Path, target: Path) -> None:
    try:
        fresh.rename(target)
    except OSError:  # another frontend process was faster
        if not target.is_dir():
            raise
