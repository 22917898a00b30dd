"""A model's folder without its weights, as one archive in the blob store: what a frontend on another host needs."""

import gzip
import hashlib
import io
import logging
import shutil
import tarfile
import tempfile
from pathlib import Path

from pdserve.errors import Unavailable

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
"""bytes of a file; the largest tokenizers have some 40 MB"""
MAX_ARCHIVE = 1 << 30
"""bytes that an archive may unpack to: tokenizers and configs, never weights"""


def pack_model(folder: Path) -> bytes:
    """The same bytes for the same files, whenever and wherever they are packed. Only the folder's own files
    and those one level down (chat templates): hidden folders and deeper ones are other people's copies."""
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
    """Its digest, so that the same files are stored once."""
    return hashlib.sha256(archive).hexdigest()[:32]


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
