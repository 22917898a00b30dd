"""Configures, starts and ends the processes of a vLLM engine."""

import asyncio
import gc
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from glob import escape, glob
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import gettempdir

import psutil

from pdserve.config.engine_args.arguments import KV_ROLES, for_engine, to_argv
from pdserve.contract.records import Role
from pdserve.engine.base import Ranks
from pdserve.engine.spec import EngineSpec
from pdserve.engine.vllm import api
from pdserve.kv import connectors, nixl_connector
from pdserve.kv.side_channel import CurveKey
from pdserve.util.errors import ConfigError, EngineDead, Unavailable
from pdserve.util.net import find_port_holder, free_port

logger = logging.getLogger(__name__)

LEASE = 30
"""Seconds for which a prefill engine keeps KV blocks for a decode engine."""
WORKER_EXTENSION = "pdserve.engine.vllm.worker.WorkerExtension"
"""A name, not the class: only vLLM's worker processes may import the module, because importing it patches vLLM."""
SHUTDOWN_TIMEOUT = 2.0
"""Seconds that vLLM's processes get to end by themselves; then they are killed."""
DEAD_POLL_INTERVAL = 0.5
"""Seconds between two checks whether the engine is dead."""
CRASHES = {signal.SIGILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGTRAP}
"""Signals that the kernel sends for an error in the process itself, not for an operator's kill."""
NO_EVENTS = "tcp://127.0.0.1:1"
"""Endpoint of KV events for ranks without the core, which send none."""


class VllmProcess:
    """Start only one engine at a time in a process, because part of vLLM's configuration is in the environment."""

    config: api.VllmConfig
    """With the values that the engine chose; set by `start`."""

    def __init__(self, spec: EngineSpec) -> None:
        self.core: api.AsyncMPClient | None = None
        self.ranks: api.MultiprocExecutor | None = None
        """Instead of the core, on a host that has only ranks of the engine."""
        self.side_channel = ""
        """ZeroMQ address at which other engines ask how to read KV."""
        self.channel_key = CurveKey.of(spec.credentials)
        self.processes: set[psutil.Process] = set()
        self._core_process: api.BaseProcess | None = None
        self._spec = spec
        self._abandoned = False
        folder = os.environ.get("VLLM_RPC_BASE_PATH") or gettempdir()
        self._meeting = f"{folder}/vllm_dist_{os.getpid()}_{spec.instance}_"

    async def start(self, events_endpoint: str) -> None:
        """Raises ConfigError, Unavailable if a hub does not answer, and EngineDead if vLLM does not start.

        vLLM's start takes a minute in a thread that cannot be stopped. On cancellation, kill the processes that vLLM
        started, so that the start fails."""
        before = _descendants()
        start = asyncio.ensure_future(asyncio.to_thread(self._start, events_endpoint))
        try:
            await asyncio.shield(start)
        except asyncio.CancelledError:
            self._abandoned = True
            while not start.done():
                await asyncio.to_thread(_kill, _descendants() - before)
                await asyncio.wait([start], timeout=0.2)
            start.exception()
            raise
        finally:
            self.processes = _descendants() - before

    async def stop(self) -> None:
        """End the engine's processes, in any state of the engine and of its start."""
        if self.core is not None:
            await asyncio.to_thread(self.core.shutdown, SHUTDOWN_TIMEOUT)
            self.core.resources.ctx.destroy(linger=0)  # vLLM leaves it to the garbage collector
        await asyncio.to_thread(_kill, self.processes)
        if self.ranks is not None:
            await asyncio.to_thread(self.ranks.shutdown)
        _remove(self._meeting)
        _remove(f"/dev/shm/{Path(self._meeting).name}")  # left by ranks that were killed
        logger.info("the engine's processes have ended")

    @property
    def kv_address(self) -> str:
        """host:port of the side channel; empty for an engine whose KV is not read."""
        return self.side_channel.removeprefix("tcp://") if self._spec.disaggregated else ""

    @property
    def dead(self) -> bool:
        if self.ranks is not None:
            return bool(self.ranks.is_failed)
        core = self._core_process
        if self.core is None or core is None:
            return True
        return bool(self.core.resources.engine_dead) or core.exitcode is not None

    async def watch(self) -> None:
        """Raises EngineDead when the core, or a rank of this host, has ended."""
        while True:
            await asyncio.sleep(DEAD_POLL_INTERVAL)
            if self.dead:
                raise self.death()

    def death(self) -> EngineDead:
        """Why the engine is dead. A core that failed may not have ended yet, and has no exit status then."""
        if self.ranks is not None:
            return EngineDead("a rank of this host died")
        return death_of(self._core_process.exitcode if self._core_process is not None else 0)

    def cpu_seconds(self) -> float:
        total = 0.0
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def _start(self, events_endpoint: str) -> None:
        self._set_environment()
        try:
            self.config = api.engine_config(self._argv(events_endpoint), self._headless)
            if self._spec.disaggregated:
                api.move_whole_prompts(self.config)
            api.keep_images()
        except ValueError as error:
            raise ConfigError([f"vLLM refuses the configuration: {error}"]) from error
        except OSError as error:
            if "couldn't connect to" not in str(error):
                raise
            text = "cannot be downloaded (its hub does not answer): `hf download` it, or give a folder"
            raise Unavailable(f"{self._spec.model} {text}") from error
        if api.on_cpu():
            _fork_this_process()
            if "distributed-executor-backend" not in self._spec.engine_args:
                api.compute_in_core(self.config)
        # Imported modules stay. Frozen, they cost no time in full garbage collections (300 ms and more), and forked
        # processes go on sharing the modules' memory with this one.
        gc.collect()
        gc.freeze()
        try:
            with _children_ignore_signals():
                if self._headless and not self._abandoned:
                    self.ranks = api.start_ranks(self.config)
                elif not self._abandoned:
                    self.core = api.start_core(self.config)
                    self._core_process = self.core.resources.engine_manager.processes[0]
        except Exception as error:
            killed = re.search(r": -(9|15)\b", str(error)) is not None  # in vLLM's "Failed core proc(s)"
            raise EngineDead(f"vLLM did not start, its log says why: {error}", killed=killed) from error

    @property
    def _headless(self) -> bool:
        return self._spec.node is not None and self._spec.node.rank > 0

    def _set_environment(self) -> None:
        """Set the variables that vLLM reads in this process and in its own processes."""
        port = self._spec.kv_port or free_port(self._spec.host)
        if holder := find_port_holder(self._spec.host, port):  # vLLM would hang for ever
            raise ConfigError(
                [f"The KV side channel's port {port} on {self._spec.host} is held by {holder}."]
            )
        host = f"[{self._spec.host}]" if ":" in self._spec.host else self._spec.host
        self.side_channel = f"tcp://{host}:{port}"
        os.environ |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self._spec.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        }
        api.meet_in(self._meeting)
        api.end_with_ranks()
        # vLLM would send spans of its start there, by gRPC
        os.environ.pop("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", None)

    def _argv(self, events_endpoint: str) -> list[str]:
        spec = self._spec
        arguments: dict[str, object] = {
            "model": spec.model,
            "worker-extension-cls": WORKER_EXTENSION,
            "enable-logging-iteration-details": True,  # for `Step.prompt_tokens`; vLLM logs none of it
        }
        if spec.served_model_name:
            arguments["served-model-name"] = [spec.served_model_name]
        if spec.node is not None:
            node = spec.node
            arguments |= {"node-rank": node.rank, "master-addr": node.host, "master-port": node.port}
        if spec.disaggregated or spec.kv_offload:
            folder = str(spec.credentials.folder.absolute()) if spec.credentials else None
            nixl = nixl_connector(KV_ROLES[spec.role], LEASE, folder) if spec.disaggregated else None
            transfer = {"engine_id": spec.instance, "kv_load_failure_policy": "recompute"}
            disk = spec.kv_offload_disk, spec.kv_offload_folder
            arguments["kv-transfer-config"] = connectors(nixl, spec.kv_offload, *disk) | transfer
        if spec.role.includes(Role.DECODE):
            arguments["kv-events-config"] = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": events_endpoint,
            }
        # frontends send images each time, so a cache of images sent before is useless
        defaults = {"mm-processor-cache-gb": 0}
        return to_argv({**defaults, **for_engine(spec.engine_args), **arguments})


class VllmRanks(Ranks):
    """A host's ranks of an engine whose core is on another host."""

    def __init__(self, spec: EngineSpec) -> None:
        self._process = VllmProcess(spec)

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        try:
            await self._process.start(NO_EVENTS)
            yield
        finally:
            await self._process.stop()

    async def watch(self) -> None:
        await self._process.watch()


def death_of(status: int | None) -> EngineDead:
    """The error for a core that ended with this exit status, which tells how its first rank ended
    (`api.end_with_ranks`)."""
    if status is None or 0 < status <= api.BY_SIGNAL:
        return EngineDead("vLLM's engine core failed", crashed=True)
    number = -status if status < 0 else status - api.BY_SIGNAL
    if status == 0:
        return EngineDead("vLLM's engine core was stopped", killed=True)
    name, crashed = signal.Signals(number).name, number in CRASHES
    return EngineDead(f"a process of vLLM's engine was ended by {name}", crashed=crashed, killed=not crashed)


def _fork_this_process() -> None:
    """Have vLLM fork its processes, with everything imported, as it does on GPUs. This halves the time to start. On the
    CPU vLLM would spawn them, because OpenMP threads do not survive a fork; this process has none. The children must
    not write their signals into the pipe that wakes this process's event loop."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _remove(beginning: str) -> None:
    """Remove all files whose path begins with this."""
    for path in glob(f"{escape(beginning)}*"):
        Path(path).unlink(missing_ok=True)


@contextmanager
def _children_ignore_signals() -> Iterator[None]:
    """Have processes that are started in this block ignore SIGINT and SIGHUP. Ctrl-C and the end of a terminal signal
    the whole foreground group, and vLLM's processes would end with all requests before this process can drain them.
    Children inherit the signals that this thread blocks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        resource_tracker.ensure_running()  # the tracker ignores SIGINT, but its start unblocks SIGINT in this thread
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _descendants() -> set[psutil.Process]:
    """All descendants of this process but multiprocessing's resource tracker, which cleans up after them."""
    tracker = getattr(resource_tracker, "_resource_tracker")._pid  # noqa: B009
    return {child for child in psutil.Process().children(recursive=True) if child.pid != tracker}


def _kill(processes: set[psutil.Process]) -> None:
    """Kill the processes that still run. psutil compares start times, so that no other process with a reused pid is
    killed. A zombie, whose parent never waited for it, counts as ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline and any(map(_is_alive, processes)):
        time.sleep(0.02)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
