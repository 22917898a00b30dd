"""The model folder of a card, on this host: in place, by hub id, or from the archive in NATS' object
store."""

import asyncio
import hashlib
import io
import logging
import shutil
import tarfile
import tempfile
from pathlib import Path

from pdserve.decode.archive import archive_name, pack_model
from pdserve.errors import Unavailable
from pdserve.messages import ModelCard
from pdserve.queue.base import BlobStore

logger = logging.getLogger(__name__)

MAX_ARCHIVE = 1 << 30
"""bytes that an archive may unpack to: tokenizers and configs, never weights"""


async def model_folder(card: ModelCard, blobs: BlobStore, state_dir: Path) -> str:
    """A folder with config, tokenizer and chat template as the worker has loaded them, or the hub id. Raises
    Unavailable where there is neither. What lies at that path on this host may be another model by now, or by chance:
    then it is the archive that counts."""
    if not card.model.startswith("/") or await asyncio.to_thread(_in_place, card):
        return card.model
    if not card.blob:
        raise Unavailable(f"{card.model} is not on this host, and its worker uploaded no archive of it")
    try:
        archive = await blobs.get(card.blob)
    except KeyError:
        raise Unavailable(f"{card.model} is not on this host, and its archive {card.blob} is gone") from None
    return str(await asyncio.to_thread(unpack, archive, state_dir / "models"))


def _in_place(card: ModelCard) -> bool:
    folder = Path(card.model)
    return folder.is_dir() and (not card.blob or archive_name(pack_model(folder)) == card.blob)


def unpack(archive: bytes, folder: Path) -> Path:
    """Into `folder/<digest>`, once: the same archive is found again. Raises Unavailable for one that is
    damaged, too large, or points outside of its own folder."""
    folder = folder.expanduser()
    target = folder / hashlib.sha256(archive).hexdigest()[:32]
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
    logger.info("unpacked a model archive to %s", target)
    return target


def _move(fresh: Path, target: Path) -> None:
    try:
        fresh.rename(target)
    except OSError:  # another frontend process was faster
        if not target.is_dir():
            raise
