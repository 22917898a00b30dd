"""What of a model's folder a frontend on another host needs: everything but the weights."""

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

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
"""bytes; the largest tokenizers have some 40 MB"""


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
    return hashlib.sha256(archive).hexdigest()[:32]
