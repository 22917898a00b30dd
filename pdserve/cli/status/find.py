"""Which running graph `pdserve status` and `pdserve set` mean."""

import os
from dataclasses import dataclass
from pathlib import Path

from pdserve.config.schema import Config
from pdserve.errors import Unavailable
from pdserve.supervisor import state


class NoGraph(Unavailable):
    """There is none; the text says where it was looked for."""


@dataclass(frozen=True)
class Found:
    etcd: str
    namespace: str
    url: str = ""
    """of its frontend, where that is known"""


def find(file: Path | None, etcd: str | None, namespace: str | None) -> Found:
    """An address given wins over a file, a file over the default state directory. Raises NoGraph,
    ConfigError."""
    if etcd:
        return Found(etcd, namespace or Config.namespace)
    if file:
        from pdserve.config.load import load

        config = load(file)
        if config.etcd:
            return Found(config.etcd, config.namespace)
        return _on(config.state_dir)
    if address := os.environ.get("PDSERVE_ETCD"):
        return Found(address, namespace or Config.namespace)
    return _on(Path(os.environ.get("PDSERVE_STATE_DIR", Config.state_dir)).expanduser())


def _on(state_dir: Path) -> Found:
    graph = state.read(state_dir)
    if graph is None:
        raise NoGraph(
            f"no graph runs on {state_dir}: start one with `pdserve serve -f FILE`, or say which one with "
            "-f FILE or --etcd HOST:PORT."
        )
    return Found(graph.etcd, graph.namespace, graph.url)
