"""The models that a frontend serves, and how one of them runs a request.

Life cycle of a request in a frontend:

1. `frontend/app.py` checks key, limits and body, finds the model in `served_models`, and calls `run`.
2. `run` waits until admission lets the request in, then calls vLLM's app, which `processor` made from the model card.
3. vLLM's app renders and tokenizes the prompt; its `AsyncLLM` adds one generation for each sequence to `engine_core`,
   which takes the place of vLLM's engine core.
4. `RemoteCore._begin` asks admission for a permit for each generation; `place` runs once it is granted.
5. `place` lets `WorkerPool.pick` (`frontend/workers/pool.py`) choose a decode worker by the router policy.
6. `next_attempt` (`frontend/sequence/migration.py`) makes the `Submit` message: prompt, tokens so far, parameters.
7. `Link.post` (`frontend/workers/link.py`) sends it. The decode worker replies `Placed` once it has decided where the
   prompt is prefilled, then `Outputs` for each engine step.
8. `RemoteCore.received` hands each step's outputs to `AsyncLLM`; with an SLO, `Pacer` may hold some back.
9. vLLM's app, or `frontend/edge/deltas.py` for most chunks of a plain stream, writes the response.
10. After the last output, or when the client leaves, `_end` cancels the attempt and releases the permit.
11. If the worker is lost, `Migration` makes the next attempt at another worker: back to 5.

`processor` and `engine_core` import vLLM, which takes 6 to 7 seconds of CPU: import them late, in a thread.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.frontend.vllm.lora_adapters import AdapterStore
from pdserve.frontend.workers import Connect


@dataclass(frozen=True)
class ModelContext:
    """What all models of a frontend share."""

    connect: Connect
    state_dir: Path
    router: str
    """policy of the configuration; the live setting `router` takes precedence"""
    request_timeout: float
    max_request_seconds: float = 3600.0
    """seconds after which every request is over"""
    adapters: AdapterStore | None = None
    """None: adapters cannot be loaded at run time"""
    building: asyncio.Lock = field(default_factory=asyncio.Lock)
    """held while a processor is built from a model folder"""
