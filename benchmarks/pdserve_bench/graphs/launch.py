"""Start graphs and plain vLLM engines for benchmarks.

A graph is started from a copy of the user's file, with its own ports, NATS and etcd, in a temporary folder. It stops on
exit from the context, and also if this process is killed.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import psutil

from pdserve.config.load import load
from pdserve.supervisor import state
from pdserve.supervisor.processes.exits import Guardian, end_group, wait_for_exit
from pdserve.util.errors import ConfigError, Unavailable
from pdserve.util.net import free_port
from pdserve.util.tied_child import tied_command
from pdserve_bench.graphs.clusters import Clusters
from pdserve_bench.graphs.sections import Sections, put, read_sections, take, with_model
from pdserve_bench.graphs.simulated import write

T = TypeVar("T")

REAL = Path("configs/local.yaml")
"""The file of the graph that `--real` starts, with real engines."""
PDSERVE = (sys.executable, "-m", "pdserve")
VLLM = "vllm.entrypoints.launchers.api_server.entry"
START_WITHIN = 900.0
TELL_EVERY = 15.0
STOP_WITHIN = 90.0
ENGINE_PATIENCE = 10.0
"""Seconds for plain vLLM to exit by itself after this process was killed."""
OURS = "pdserve: "
READY = "Ready after"
"""Printed by `serve` once the graph responds."""
MODEL_LIMIT = 256 << 20
DISK = 1 << 30
"""Bytes of a graph's own file system: etcd and JetStream reserve space before they write."""
CUTTABLE = {"UCX_TLS": os.environ.get("UCX_TLS", "tcp,cuda_copy,self"), "GODEBUG": "multipathtcp=0"}
"""Variables of a graph whose connections are to be cut: UCX over TCP, because shared memory cannot be cut, and no
multipath TCP (Go's default for listeners), because the kernel does not filter it."""
SIM_SPEED = {
    "sim": {
        "step-seconds": 0.02,
        "prefill-rate": 5000,
        "lease": 12,
        "fatal-token": 1001,
        "stop-signal": int(signal.SIGUSR2),
    }
}
"""`additional-config` of simulated engines if the file has none. They are so slow that faults hit them in the middle of
a request. Only poison prompts contain the fatal token."""


class ServerRun:
    """A server in its own process, with its output in a file. It gets SIGTERM if this process dies."""

    process: "subprocess.Popen[bytes]"

    def __init__(self, command: "list[str]", log: Path, variables: Mapping[str, str] | None = None) -> None:
        self.command, self.log = command, log
        self.env = {**os.environ, **(variables or {})}

    def start(self) -> "subprocess.Popen[bytes]":
        """Use a process group but not a session, because a session gets its own scheduling group."""
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                tied_command(self.command),
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
            )
        return self.process

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    async def until(self, ready: Callable[[], Awaitable[T]], say: Callable[[str], None]) -> T:
        """Wait until `ready` returns a true value, and return it. Raises ConfigError, or Unavailable with the end of
        the output, if the server does not start."""
        began, tell_at = time.monotonic(), TELL_EVERY
        while not (found := await ready()):
            seconds = time.monotonic() - began
            if self.process.poll() == 2:
                raise ConfigError(_complaints(self.text))
            if self.process.poll() is not None or seconds > START_WITHIN:
                raise Unavailable(f"{self.command[2]} did not start:\n{self.text[-3000:]}")
            if seconds > tell_at:
                say(f"still starting after {seconds:.0f} s")
                tell_at += TELL_EVERY
            await asyncio.sleep(0.1)
        return found

    async def says(self, words: str, say: Callable[[str], None]) -> None:
        """Wait until the output contains `words`. Raises like `until`."""

        async def said() -> bool:
            return words in self.text

        await self.until(said, say)

    async def stop(self) -> None:
        """Send SIGINT and wait for the exit, even if cancelled or if the server is still starting."""
        stopping = asyncio.ensure_future(self._stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await stopping
            raise

    async def _stop(self) -> None:
        if not hasattr(self, "process"):
            return
        self.process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(wait_for_exit(self.process), STOP_WITHIN)
        except TimeoutError:
            self.process.kill()  # the server's guardian ends the children
            await wait_for_exit(self.process)


def _complaints(text: str) -> list[str]:
    """Return the server's errors about its command line or file."""
    lines = text.splitlines()
    ours = [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]
    return ours or lines[-3:]


class ServeRun(ServerRun):
    """`pdserve serve` with its state, log and file in a folder, isolated from the servers of other graphs."""

    def __init__(
        self, folder: Path, file: Path, *options: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.file, self.state_dir = folder, file, folder / "state"
        command = [*PDSERVE, "serve", "-f", str(file), *options]
        super().__init__(command, folder / "serve.log", variables)
        for name in ("PDSERVE_NATS", "PDSERVE_ETCD", "PDSERVE_CREDENTIALS"):
            self.env.pop(name, None)
        self.env["PDSERVE_STATE_DIR"] = str(self.state_dir)

    def ready(self) -> bool:
        return READY in self.text

    def processes(self) -> list[psutil.Process]:
        """Return the graph's live processes: they have the state directory in their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("PDSERVE_STATE_DIR") == self.env["PDSERVE_STATE_DIR"]
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


def family(pid: int) -> list[psutil.Process]:
    """Return the process and its descendants; empty if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


@dataclass
class RunningGraph:
    """A graph on this machine, started by this process or not."""

    graph: state.GraphRecord
    state_dir: Path
    clusters: Clusters | None = field(default=None, kw_only=True)
    """The NATS and etcd clusters; None without any."""

    @property
    def urls(self) -> list[str]:
        """The frontends' URLs; one if they share a port."""
        return [self.graph.url]

    @property
    def alive(self) -> bool:
        """False once the supervisor has ended: then nothing is restarted."""
        try:
            return bool(psutil.Process(self.graph.pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False

    def family(self) -> list[psutil.Process]:
        return family(self.graph.pid)


@dataclass
class StartedGraph(RunningGraph):
    """A graph that this process started with `serve`."""

    serve: ServeRun
    say: Callable[[str], None]
    model: Path | None = None
    """A writable copy of the model's folder; None if there is none."""
    disk: bool = False
    """The state directory is a small file system of its own, which is safe to fill."""
    away: bool = False
    """The supervisor was killed on purpose and its successor is not ready yet."""

    @property
    def alive(self) -> bool:
        return self.away or super().alive

    async def start(self) -> None:
        """Start the graph, for the first time or again. Raises ConfigError and Unavailable."""
        self.serve.start()
        await self.serve.says(READY, self.say)
        graph = state.read(self.state_dir)
        assert graph is not None
        self.graph, self.away = graph, False


SHORT = 64
"""Prompts up to this many tokens are prefilled locally."""


@asynccontextmanager
async def started(
    file: Path,
    folder: Path,
    say: Callable[[str], None],
    *,
    workers: int = 1,
    dtype: str = "",
    own_model: bool = False,
    own_disk: bool = False,
    thresholds: bool = False,
    frontends: int = 1,
    security: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    servers: Mapping[str, str] | None = None,
    adds: Sequence[Mapping[str, Mapping[str, object]]] = (),
) -> AsyncIterator[StartedGraph]:
    """Start a graph; stop it with SIGINT on exit. Raises ConfigError, and Unavailable with the end of the output.

    `own_model` copies the model and `own_disk` mounts a small file system for the state, if possible. `thresholds`
    replaces the policy `adaptive` by a length threshold, so that remote prefills surely happen. `frontends` is a
    minimum. `servers` are external `nats` and `etcd` addresses. `security` becomes the section `Security`; without it
    clients use plain http. `adds` are keys for existing sections.
    """
    config = load(file, {})
    model = _copied(Path(config.model), folder) if own_model else None
    ports = free_port(config.host), free_port(config.host, 16 * workers)
    sections = derive(file, workers, *ports, dtype, model)
    if thresholds:
        with_thresholds(sections)
    _multiply(
        sections["Frontend"], max(frontends, workers, config.frontend.processes if config.frontend else 1)
    )
    if security:
        sections["Security"] = dict(security)
    sections["Graph"] |= servers or {}
    for name, keys in chain.from_iterable(added.items() for added in adds):
        for key, value in keys.items() if name in sections else ():
            put(sections[name], key, value)
    serve = ServeRun(folder, write(sections, folder / "graph.yaml"), variables=variables)
    with small_disk(serve.state_dir) if own_disk else nullcontext(False) as disk:
        nothing = state.GraphRecord(0, "", "", "", "", "")
        found = StartedGraph(nothing, serve.state_dir, serve, say, model, disk)
        try:
            await found.start()
            yield found
        finally:
            await serve.stop()


@asynccontextmanager
async def plain_vllm(
    model: Path,
    arguments: list[str],
    folder: Path,
    say: Callable[[str], None],
    variables: Mapping[str, str] | None = None,
) -> AsyncIterator[str]:
    """Start vLLM's own API server, the baseline, and yield its URL once it responds. On a CPU host it gets one thread
    and 1 GiB of KV cache unless `variables` say otherwise."""
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", VLLM, "--model", str(model), "--port", str(port), *arguments]
    server = ServerRun(command, folder / "vllm.log", {**small, **(variables or {})})
    with Guardian(ENGINE_PATIENCE) as guardian:
        process = server.start()
        guardian.watch(process.pid)
        try:
            await server.says("Application startup complete", say)
            yield url
        finally:
            await server.stop()
            await asyncio.shield(end_group(process.pid))  # an engine that was starting can outlive its server
            guardian.forget(process.pid)


def derive(
    file: Path, workers: int, port: int, kv_port: int, dtype: str = "", model: Path | None = None
) -> Sections:
    """Return the file's sections with at least `workers` per role, own NATS and etcd, and `model`. Raises
    ConfigError."""
    config = load(file, {})
    if config.frontend is None:
        raise ConfigError([f"{file} has no Frontend section, which the requests need."])
    sections = with_model(read_sections(file), str(model or config.model))
    sections.pop("Security", None)  # clients use plain http on this machine
    take(sections["Frontend"], "host")
    graph = sections.setdefault("Graph", {})
    for key in ("nats", "etcd", "state-dir", "kv-port"):
        take(graph, key)
    graph |= {"kv-port": kv_port, "namespace": "bench"}
    put(sections["Frontend"], "port", port)
    put(sections["Frontend"], "served-model-name", config.served_model_name)
    _multiply(sections["Frontend"], max(workers, config.frontend.processes))
    for name, worker in (("VllmWorker", config.decode), ("PrefillWorker", config.prefill)):
        if worker is None:
            continue
        _multiply(sections[name], max(workers, worker.count))
        if worker.engine == "sim" and "additional-config" not in worker.engine_args:
            sections[name]["additional-config"] = SIM_SPEED
        elif worker.engine != "sim" and dtype:
            put(sections[name], "dtype", dtype)
    return sections


def with_thresholds(sections: Sections) -> Sections:
    """Replace the policy `adaptive` by a length threshold."""
    if sections["VllmWorker"].get("policy") == "adaptive":
        take(sections["VllmWorker"], "policy")
        sections["VllmWorker"]["max-local-prefill-length"] = SHORT
    return sections


def _multiply(section: dict[str, Any], count: int) -> None:
    section["ServiceArgs"] = service = dict(take(section, "ServiceArgs") or {})
    put(service, "workers", count)


def _copied(model: Path, folder: Path) -> Path | None:
    """Return None for a hub model and for one over `MODEL_LIMIT`."""
    if not model.is_dir() or sum(file.stat().st_size for file in model.iterdir()) > MODEL_LIMIT:
        return None
    return Path(shutil.copytree(model, folder / "model"))


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a file system in memory if permitted, and yield whether it was mounted. The logs are kept afterwards."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "pdserve-chaos", folder]).returncode:
        yield False
        return
    try:
        yield True
    finally:
        kept = folder.with_name("kept")
        shutil.copytree(folder / "logs", kept, dirs_exist_ok=True)
        subprocess.run(["umount", "--lazy", folder], check=True)
        kept.rename(folder / "logs")
