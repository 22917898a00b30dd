"""The state directory: one graph at a time, and where to find the one that runs."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from pdserve.errors import ConfigError

_LOCK, _RECORD = "lock", "graph.json"


class Graph(msgspec.Struct, frozen=True):
    """A running graph, as `graph.json` in its state directory tells it to `pdserve status` and the like."""

    pid: int
    """of its supervisor"""
    config: str
    model: str
    namespace: str
    etcd: str
    nats: str
    url: str = ""
    """of its frontend, empty where it has none"""


@contextlib.contextmanager
def only_one(state_dir: Path) -> Iterator[None]:
    """Hold the state directory. Raises ConfigError where another graph has it. The lock dies with the
    process."""
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / _LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                [
                    f"Another graph runs on {state_dir} (pid {lock.read().strip() or 'unknown'}): stop it, "
                    "or give this one a folder of its own (Graph: state-dir)."
                ]
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield
        finally:
            (state_dir / _RECORD).unlink(missing_ok=True)


def write(state_dir: Path, graph: Graph) -> None:
    fresh = state_dir / f"{_RECORD}.new"
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(graph)))
    fresh.replace(state_dir / _RECORD)


def read(state_dir: Path) -> Graph | None:
    """The graph that runs on this state directory, None where none does."""
    try:
        graph = msgspec.json.decode((state_dir / _RECORD).read_bytes(), type=Graph)
    except (OSError, msgspec.MsgspecError):
        return None
    return graph if psutil.pid_exists(graph.pid) else None
