"""One model as a frontend serves it: `processor` makes vLLM's own app from a model card, on the engine core of `core`,
which sends each request to one of the model's decode workers (`workers`, chosen by `router`) and, if that worker is
lost, to another (`migration`).

`processor` and `core` import vLLM, which takes 6 to 7 seconds of CPU: import them late, and in a thread.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.frontend.model.adapters import AdapterStore
from pdserve.stream.tcp import TcpStreamClient

Connect = Callable[[str], TcpStreamClient]
"""makes a client for a decode worker's address, not yet entered"""


@dataclass(frozen=True)
class ModelContext:
    """Shared by all models of a frontend."""

    connect: Connect
    state_dir: Path
    router: str
    """the configured policy; the live setting `router` takes precedence"""
    request_timeout: float
    longest: float = 3600.0
    """seconds after which every request is over"""
    adapters: AdapterStore | None = None
    """None: nothing can be loaded at run time"""
    building: asyncio.Lock = field(default_factory=asyncio.Lock)
    """held while one of the models is made from its folder"""
