"""The graph under test: one that runs already, or the file's, with enough of everything, ports and servers of its
own, in a folder that is thrown away."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.config.tree import Findings, read_tree
from pdserve.errors import ConfigError, Unavailable
from pdserve.ports import free_port
from pdserve.supervisor import state
from pdserve.supervisor.exits import dies_with_parent, exit_of

START_WITHIN = 900.0
STOP_WITHIN = 90.0
GRAPH_FILE = "graph.yaml"
MODEL_LIMIT = 256 << 20
DISK = 1 << 30
"""bytes of a graph's own file system: etcd and JetStream want room before they write anything"""
_SECTIONS = {"Frontend": "frontend", "VllmWorker": "decode", "PrefillWorker": "prefill"}
SIM_SPEED = {"sim": {"step-seconds": 0.02, "prefill-rate": 5000, "lease": 12, "fatal-token": 1001}}
"""of simulated engines whose file says nothing: requests last long enough to be caught in the middle, KV that nobody
reads is free soon, and no prompt but poison has the fatal token"""


def derive(
    file: Path, workers: int, port: int, kv_port: int, dtype: str = "", model: Path | None = None
) -> dict[str, Any]:
    """The sections of the file, changed: at least `workers` of each role, NATS and etcd always the graph's own, and
    `model` instead of its model. Raises ConfigError."""
    config = load(file, {})
    tree = read_tree(file, Findings(file))
    sections: dict[str, Any] = {name: dict(entry.value or {}) for name, entry in tree.items()}  # type: ignore[call-overload]
    if config.frontend is None:
        raise ConfigError([f"{file} has no Frontend section: chaos asks as clients do."])
    for section in sections.values():
        if _take(section, "model") is not None:
            section["model"] = str(model or config.model)
    graph = sections.setdefault("Graph", {})
    for key in ("nats", "etcd", "state-dir", "kv-port"):
        _take(graph, key)
    graph |= {"kv-port": kv_port, "namespace": "chaos"}
    for name, role in _SECTIONS.items():
        if name in sections:
            _multiply(sections[name], max(workers, _count(config, role)))
    _set(sections["Frontend"], "port", port)
    _set(sections["Frontend"], "served-model-name", config.served_model_name)
    for name, worker in (("VllmWorker", config.decode), ("PrefillWorker", config.prefill)):
        if worker is not None and worker.engine == "sim" and "additional-config" not in worker.engine_args:
            sections[name]["additional-config"] = SIM_SPEED
        elif worker is not None and worker.engine != "sim" and dtype:
            _set(sections[name], "dtype", dtype)
    return sections


def _count(config: Config, role: str) -> int:
    if role == "frontend":
        return config.frontend.processes if config.frontend else 0
    worker = config.decode if role == "decode" else config.prefill
    return worker.count if worker else 0


def _multiply(section: dict[str, Any], count: int) -> None:
    service = dict(_take(section, "ServiceArgs") or {})
    _set(service, "workers", count)
    section["ServiceArgs"] = service


def _set(section: dict[str, Any], key: str, value: object) -> None:
    _take(section, key)
    section[key] = value


def _take(section: dict[str, Any], key: str) -> Any:
    """Remove it, however it is spelled."""
    for name in list(section):
        if name.replace("_", "-") == key:
            return section.pop(name)
    return None


@dataclass
class Running:
    """A graph on this machine. One that somebody else started is taken as it is."""

    graph: state.GraphRecord
    state_dir: Path

    @property
    def alive(self) -> bool:
        """False once its supervisor is gone: nothing will be started again."""
        try:
            return bool(psutil.Process(self.graph.pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False


@dataclass
class Started(Running):
    """One that this process started, in a folder of its own."""

    folder: Path
    process: "subprocess.Popen[bytes]"
    say: Callable[[str], None]
    model: Path | None = None
    """a copy of its model's folder, which may be changed; None where it has none"""
    disk: bool = False
    """its state directory is a file system of its own, which may be filled"""
    away: bool = False
    """its supervisor was killed on purpose, and the next one is not ready"""

    @property
    def alive(self) -> bool:
        return self.away or super().alive

    async def again(self) -> None:
        """Start it once more, after its supervisor has ended. Raises Unavailable."""
        self.process = _spawn(self.folder)
        await _until_ready(self.process, self.folder, self.say)
        graph = state.read(self.state_dir)
        assert graph is not None
        self.graph, self.away = graph, False


@asynccontextmanager
async def started(
    file: Path,
    folder: Path,
    workers: int,
    dtype: str,
    say: Callable[[str], None],
    *,
    own_model: bool = False,
    own_disk: bool = False,
) -> AsyncIterator[Started]:
    """A graph that serves; stopped as by Ctrl-C on leaving, and nothing of it is left. With `own_model` it gets a
    copy of its model, with `own_disk` a small file system for its state, as far as that can be done. Raises ConfigError
    and Unavailable with the end of its output where it does not come up."""
    config = load(file, {})
    model = _copied(Path(config.model), folder) if own_model else None
    ports = free_port(config.host), free_port(config.host, 16 * workers)
    sections = derive(file, workers, *ports, dtype, model)
    (folder / GRAPH_FILE).write_text(json.dumps(sections, indent=2))  # JSON is YAML
    state_dir = folder / "state"
    with small_disk(state_dir) if own_disk else nullcontext(False) as disk:
        process = _spawn(folder)
        nothing = state.GraphRecord(process.pid, "", "", "", "", "")
        found = Started(nothing, state_dir, folder, process, say, model, disk)
        try:
            await _until_ready(process, folder, say)
            graph = state.read(state_dir)
            assert graph is not None
            found.graph = graph
            yield found
        finally:
            await _stop(found.process)


def _copied(model: Path, folder: Path) -> Path | None:
    """None for a hub's model, and for one that is too large to be copied about."""
    if not model.is_dir() or sum(each.stat().st_size for each in model.iterdir()) > MODEL_LIMIT:
        return None
    return Path(shutil.copytree(model, folder / "model"))


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system in memory at `folder`, where this process may mount one. What was written there stays when
    it is gone."""
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


def _spawn(folder: Path) -> "subprocess.Popen[bytes]":
    with (folder / "serve.log").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "pdserve", "serve", "-f", str(folder / GRAPH_FILE)],
            env=environment(os.environ, folder / "state"),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            process_group=0,
            preexec_fn=dies_with_parent(signal.SIGTERM),
        )


def environment(ours: Mapping[str, str], state_dir: Path) -> dict[str, str]:
    """Nobody else's servers are ever harmed. UCX over TCP: shared memory cannot be cut, and neither can the
    multipath TCP on which servers written in Go listen."""
    clean = {name: value for name, value in ours.items() if name not in ("PDSERVE_NATS", "PDSERVE_ETCD")}
    return {
        **clean,
        "PDSERVE_STATE_DIR": str(state_dir),
        "UCX_TLS": ours.get("UCX_TLS", "tcp,cuda_copy,self"),
        "GODEBUG": "multipathtcp=0",
    }


async def _until_ready(process: "subprocess.Popen[bytes]", folder: Path, say: Callable[[str], None]) -> None:
    log, seconds = folder / "serve.log", 0
    while "Ready after" not in (text := log.read_text(errors="replace")):
        if process.poll() == 2:
            raise ConfigError([line.removeprefix("pdserve: ") for line in text.splitlines()])
        if process.poll() is not None or seconds > START_WITHIN:
            raise Unavailable(f"the graph did not come up:\n{text[-3000:]}")
        if seconds and seconds % 15 == 0:
            say(f"still starting after {seconds} s")
        await asyncio.sleep(1)
        seconds += 1


async def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGINT)
    try:
        await asyncio.wait_for(exit_of(process), STOP_WITHIN)
    except TimeoutError:
        process.kill()  # its guardian ends the rest
        await exit_of(process)
