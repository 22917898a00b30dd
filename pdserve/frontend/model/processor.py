"""The processor of one model, made from its model card: vLLM's app and renderer on the remote engine core."""

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from starlette.types import ASGIApp

from pdserve.config.engine_args.arguments import speculation, to_argv
from pdserve.contract.records import Instance, ModelCard
from pdserve.frontend.model import ModelContext
from pdserve.frontend.model.engine_core import RemoteCore
from pdserve.frontend.vllm.api_server import (
    VERSION,
    OutputHandler,
    fail_request,
    make_app,
    make_engine,
    parse_args,
    stream_deltas,
)
from pdserve.frontend.vllm.images import LIMITS
from pdserve.frontend.vllm.lora_routes import AppAdapters
from pdserve.frontend.vllm.side_loop import SideLoop
from pdserve.frontend.workers.pool import WorkerPool
from pdserve.runtime.tasks import TaskOwner
from pdserve.stream.archives import archive_name, fetch, pack_model, unpack
from pdserve.util.errors import ConfigError, PeerGone, Unavailable

logger = logging.getLogger(__name__)

Workers = Callable[[], list[Instance]]
FETCH_TIMEOUT = 10.0
"""Seconds to fetch a model's archive from any worker."""
ASK_INTERVAL = 1.0
"""Seconds after which one more task asks the workers for the archive, because a worker may not reply."""
WORKER_POLL_INTERVAL = 0.2
"""Seconds between two rounds of such a task."""


@dataclass(frozen=True)
class Processor:
    app: ASGIApp
    """vLLM's own"""
    aside: ASGIApp
    """the same app on an event loop in a thread, for large requests (`vllm/side_loop.py`)"""
    core: RemoteCore
    workers: WorkerPool
    adapters: AppAdapters


@asynccontextmanager
async def serve_model(card: ModelCard, context: ModelContext, workers: Workers) -> AsyncIterator[Processor]:
    """Serve the model card while entered; `workers` returns the workers with this card. Entering takes one or two
    seconds, and longer if it fetches an archive. Raises ConfigError or Unavailable if this host cannot serve the
    card."""
    if card.vllm_version != VERSION:
        theirs = card.vllm_version or "an unknown version"
        raise ConfigError(
            [f"its workers run vLLM {theirs}, this frontend {VERSION}: install the same on both."]
        )
    core = RemoteCore(card, context)
    async with AsyncExitStack() as stack:
        registry = stack.enter_context(MODEL_METRICS.model())
        folder = await model_folder(card, context, workers)
        side = await stack.enter_async_context(SideLoop())
        try:
            async with context.building:
                args = await asyncio.to_thread(parse_args, frontend_argv(card, folder))
                engine = await asyncio.to_thread(make_engine, args, core, registry)
                # vLLM refuses some parameters if this is set
                engine.input_processor.speculative_config = speculation(card.engine_args) or None
                stack.push_async_callback(core.workers.close)
                stack.callback(engine.shutdown)
                # runs before the links are closed: a request must not migrate while they close
                stack.callback(core.shutdown)
                side.wrap_generate(engine)
                app, core.plain_paths, names = await make_app(engine, args, card.supported_tasks)
        except (ValueError, OSError) as error:
            raise ConfigError([f"vLLM refuses its configuration: {error}"]) from error
        core.fail_request = partial(fail_request, engine)
        core.stream_deltas = partial(stream_deltas, engine)
        core.process = OutputHandler(engine).process
        adapters = AppAdapters(names, card.name, context.adapters)
        yield Processor(app, side.app(app), core, core.workers, adapters)


# ── from a card to vLLM's arguments ────────────────────────────────────────────────────────────────────


async def model_folder(card: ModelCard, context: ModelContext, workers: Workers) -> str:
    """Return the model's folder or hub id. If this host lacks the card's folder, or has other files there, unpack a
    worker's archive and return the folder with its files. Raises Unavailable if there is no archive."""
    folder = context.state_dir.expanduser() / "models"
    if not card.model.startswith("/") or await asyncio.to_thread(_is_in_place, card):
        return card.model
    if not card.blob:
        raise Unavailable(f"{card.model} is not on this host, and its worker has no archive of it")
    if (folder / card.blob).is_dir():
        return str(folder / card.blob)
    return str(await asyncio.to_thread(unpack, await _archive(card, context, workers), folder))


async def _archive(card: ModelCard, context: ModelContext, workers: Workers) -> bytes:
    """Fetch the card's archive from any worker. Asks the workers in random order, again and again, because they may
    register after their card."""
    archive: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    asked: set[str] = set()

    async def ask_all() -> None:
        while not archive.done():
            for worker in random.sample(found := workers(), len(found)):
                if worker.id not in asked:
                    asked.add(worker.id)
                    with suppress(PeerGone, Unavailable):
                        async with context.connect(worker.address) as client:
                            data = await fetch(client)
                        if archive_name(data) == card.blob and not archive.done():
                            archive.set_result(data)
                    asked.discard(worker.id)
            await asyncio.sleep(WORKER_POLL_INTERVAL)

    async with TaskOwner() as tasks:
        end = time.monotonic() + FETCH_TIMEOUT
        while not archive.done() and (left := end - time.monotonic()) > 0:
            tasks.start(ask_all(), f"archive: {card.name}")
            await asyncio.wait({archive}, timeout=min(ASK_INTERVAL, left))
    if archive.done():
        return archive.result()
    raise Unavailable(f"{card.model} is not on this host, and no worker sends its archive {card.blob}")


def _is_in_place(card: ModelCard) -> bool:
    folder = Path(card.model)
    return folder.is_dir() and (not card.blob or archive_name(pack_model(folder)) == card.blob)


# Arguments left out here, because only an engine reads them or the edge handles them; some would start processes or
# check for hardware. All others (tokenizer, templates, parsers, limits, sampling defaults) are passed to vLLM's app.
_ENGINE_ONLY = re.compile(
    r"kv-.*|ec-.*|.*-parallel.*|data-parallel-.*|pipeline-.*|tensor-.*|gpu-.*|num-gpu-.*|cpu-.*|swap-.*|enforce-eager"
    r"|block-size|max-num-.*|.*prefix-caching.*|.*chunked-prefill|scheduling-policy|async-scheduling|stream-interval"
    r"|load-format|download-dir|quantization|spec(-|ulative-).*|compilation-config|additional-config|attention-.*"
    r"|distributed-executor-backend|ray-.*|worker-.*|offload-.*|.*lora.*|enable-sleep-mode|enable-prompt-embeds"
    r"|api-key|host|port|uds|ssl-.*|middleware|allowed-origins|root-path|enable-request-id-headers|disable-log-stats"
    r"|profiler-config|otlp-.*|enable-scale-out|tokens-only|headless|api-server-count|config|model|served-model-name"
    r"|mm-processor-cache.*|mm-(shm|ipc|tensor|encoder)-.*|max-model-len|enable-log-requests|uvicorn-log-level|disable-.*access-log.*|performance-mode|optimization-level"
)


def frontend_argv(card: ModelCard, model: str) -> list[str]:
    """Return the arguments of vLLM's API server without an engine. `model`: a folder of this host, or a hub id."""
    kept = {name: value for name, value in card.engine_args.items() if not _ENGINE_ONLY.fullmatch(name)}
    ours: dict[str, object] = {
        "model": model,
        "served-model-name": [card.name],
        "max-model-len": card.max_model_len,
        "allowed-origins": [],
        "mm-processor-cache-gb": 0,  # the cache would omit images, assuming that the one engine has them
    }
    # 2 threads: while one tokenizes a long text, the other tokenizes short prompts
    return to_argv({"renderer-num-workers": 2, "limit-mm-per-prompt": LIMITS, **kept, **ours})


# ── metrics ────────────────────────────────────────────────────────────────────────────────────────────


class ModelMetrics(Collector):
    """vLLM's request metrics, merged from one registry per model. Leaves out gauges, which describe an engine."""

    def __init__(self) -> None:
        self._registries: list[CollectorRegistry] = []

    def describe(self) -> list[Metric]:
        return []  # claims no names, because all models have the same

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for registry in self._registries:
            for metric in registry.collect():
                if metric.type == "gauge":
                    continue
                known = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                known.samples += metric.samples
        for metric in merged.values():
            metric.samples = _merged(metric.samples)
            yield metric

    @contextmanager
    def model(self) -> Iterator[CollectorRegistry]:
        """Yield a registry that is collected while entered."""
        registry = CollectorRegistry()
        self._registries.append(registry)
        try:
            yield registry
        finally:
            self._registries.remove(registry)


def _merged(samples: Iterable[Sample]) -> list[Sample]:
    """Sum the samples of each series: while its card changes, a model has two processors."""
    sums: dict[tuple[object, ...], Sample] = {}
    for sample in samples:
        series = sample.name, *sorted(sample.labels.items())
        before = 0.0 if sample.name.endswith("_created") or series not in sums else sums[series].value
        sums[series] = sample._replace(value=before + sample.value)
    return list(sums.values())


MODEL_METRICS = ModelMetrics()
REGISTRY.register(MODEL_METRICS)
