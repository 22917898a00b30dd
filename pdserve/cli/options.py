"""Options that several commands share, and the running graph that they mean."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from pdserve.config.load import load
from pdserve.config.schema import Config
from pdserve.errors import Unavailable
from pdserve.supervisor import state

File = Annotated[Path, typer.Option("-f", "--file", metavar="FILE", help="the graph, as configs/local.yaml")]
LogFormat = Annotated[
    Literal["text", "json"],
    typer.Option(envvar="PDSERVE_LOG_FORMAT", help="json: one object per line, for machines"),
]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="vLLM's own INFO lines as well")]
GraphFile = Annotated[
    Path | None,
    typer.Option(
        "-f",
        "--file",
        metavar="FILE",
        help="the graph's file (default: the graph that runs on the default state directory)",
    ),
]
Etcd = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="the graph's etcd, instead of a file")]
Namespace = Annotated[str | None, typer.Option(metavar="NAME", help="with --etcd (default: pdserve)")]


class NoGraph(Unavailable):
    """No graph runs; the text says where it was looked for."""


@dataclass(frozen=True)
class GraphAddress:
    """Of a running graph."""

    etcd: str
    namespace: str
    url: str = ""
    """of its frontend, where that is known"""


def find_graph(file: Path | None, etcd: str | None, namespace: str | None) -> GraphAddress:
    """An address given wins over a file, a file over the default state directory. Raises NoGraph, ConfigError."""
    if etcd:
        return GraphAddress(etcd, namespace or Config.namespace)
    if file:
        config = load(file)
        return GraphAddress(config.etcd, config.namespace) if config.etcd else _on(config.state_dir)
    if address := os.environ.get("PDSERVE_ETCD"):
        return GraphAddress(address, namespace or Config.namespace)
    return _on(Path(os.environ.get("PDSERVE_STATE_DIR", Config.state_dir)).expanduser())


def _on(state_dir: Path) -> GraphAddress:
    graph = state.read(state_dir)
    if graph is None:
        raise NoGraph(
            f"no graph runs on {state_dir}: start one with `pdserve serve -f FILE`, or say which one with "
            "-f FILE or --etcd HOST:PORT."
        )
    return GraphAddress(graph.etcd, graph.namespace, graph.url)
