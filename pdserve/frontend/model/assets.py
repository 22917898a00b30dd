"""The model folder of a card, on this host: in place, by hub id, or from the archive in NATS' object
store."""

import asyncio
from pathlib import Path

from pdserve.errors import Unavailable
from pdserve.messages import ModelCard
from pdserve.queue.archives import archive_name, pack_model, unpack
from pdserve.queue.base import BlobStore


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
