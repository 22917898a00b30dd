"""What all processors of a frontend share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdserve.queue.base import BlobStore
from pdserve.stream.base import StreamClient

Connect = Callable[[str], StreamClient]
"""from a decode worker's address to a client, not yet entered"""


@dataclass(frozen=True)
class Surroundings:
    connect: Connect
    blobs: BlobStore
    state_dir: Path
    router: str
    """the configured policy; the live setting `router` goes before it"""
    request_timeout: float
    longest: float = 3600.0
    """seconds after which every request is over"""
