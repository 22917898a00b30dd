"""The graph under test: the file's, with enough of everything, ports and servers of its own, in a folder that
is thrown away."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from pdserve.config.findings import Findings
from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.config.tree import read_tree
from pdserve.errors import ConfigError, Unavailable
from pdserve.ports import free_port
from pdserve.supervisor import state
from pdserve.supervisor.exits import dies_with_parent, exit_of

START_WITHIN = 900.0
STOP_WITHIN = 90.0
_SECTIONS = {"Frontend": "frontend", "VllmWorker": "decode", "PrefillWorker": "prefill"}
SIM_SPEED = {"sim": {"step-seconds": 0.02, "prefill-rate": 5000}}
"""of simulated engines whose file says nothing: requests last long enough to be caught in the middle"""


def derive(file: Path, workers: int, port: int, kv_port: int, dtype: str = "") -> dict[str, Any]:
    """The sections of the file, changed: at least `workers` of each role, NATS and etcd always the graph's own.
    Raises ConfigError."""
    config = load(file, {})
    tree = read_tree(file, Findings(file))
    sections: dict[str, Any] = {name: dict(entry.value or {}) for name, entry in tree.items()}  # type: ignore[call-overload]
    if config.frontend is None:
        raise ConfigError([f"{file} has no Frontend section: chaos asks as clients do."])
    for section in sections.values():
        if _take(section, "model") is not None:
            section["model"] = config.model
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


def free_ports(host: str, count: int) -> int:
    """The first of so many free ports in a row, below those that the kernel gives to connections."""
    while True:
        first = random.randint(15000, 30000)
        if all(_is_free(host, port) for port in range(first, first + count)):
            return first


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind((host, port))
        return True
    return False


@asynccontextmanager
async def started(
    file: Path, folder: Path, workers: int, dtype: str, say: Callable[[str], None]
) -> AsyncIterator[state.Graph]:
    """A graph that serves; stopped as by Ctrl-C on leaving, and nothing of it is left. Raises ConfigError and
    Unavailable with the end of its output where it does not come up."""
    host = load(file, {}).host
    sections = derive(file, workers, free_port(host), free_ports(host, 16 * workers), dtype)
    graph_file = folder / "graph.yaml"
    graph_file.write_text(json.dumps(sections, indent=2))  # JSON is YAML
    process = _spawn(graph_file, folder)
    try:
        await _until_ready(process, folder, say)
        graph = state.read(folder / "state")
        assert graph is not None
        yield graph
    finally:
        await _stop(process)


def _spawn(graph_file: Path, folder: Path) -> "subprocess.Popen[bytes]":
    with (folder / "serve.log").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "pdserve", "serve", "-f", str(graph_file)],
            env=_environment(os.environ, folder / "state"),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            process_group=0,
            preexec_fn=dies_with_parent(signal.SIGTERM),
        )


def _environment(ours: Mapping[str, str], state_dir: Path) -> dict[str, str]:
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
