"""One model as a frontend serves it: `processor` makes vLLM's own app from a model card, on the engine core of
`engine_core`, which sends each request to one of the model's decode workers (`frontend/workers`) and, if that worker is
lost, to another (`frontend/sequence/migration.py`).

`processor` and `engine_core` import vLLM, which takes 6 to 7 seconds of CPU: import them late, and in a thread.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.frontend.vllm.lora_adapters import AdapterStore
from pdserve.frontend.workers import Connect


@dataclass(frozen=True)
class ModelContext:
    """Shared by all models of a frontend."""

    connect: Connect
    state_dir: Path
    router: str
    """the configured policy; the live setting `router` takes precedence"""
    request_timeout: float
    max_request_seconds: float = 3600.0
    """seconds after which every request is over"""
    adapters: AdapterStore | None = None
    """None: nothing can be loaded at run time"""
    building: asyncio.Lock = field(default_factory=asyncio.Lock)
    """held while one of the models is made from its folder"""
