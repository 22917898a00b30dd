"""Systems that a comparison starts: plain vLLM, or a graph."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pdserve_bench.endpoint import Endpoint
from pdserve_bench.graphs.launch import plain_vllm, started
from pdserve_bench.graphs.simulated import write


class System(Protocol):
    def start(self, folder: Path) -> AbstractAsyncContextManager[Endpoint]:
        """Start in an empty folder; stop on exit. Raises ConfigError and Unavailable if it does not start."""


@dataclass(frozen=True)
class PlainVllm:
    """vLLM's own API server with one engine."""

    model: Path
    served: str
    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its environment."""

    @asynccontextmanager
    async def start(self, folder: Path) -> AsyncIterator[Endpoint]:
        arguments = [*self.arguments, "--served-model-name", self.served]
        async with plain_vllm(self.model, arguments, folder, _quiet, self.variables) as url:
            yield Endpoint(url, self.served)


@dataclass(frozen=True)
class GraphSystem:
    """`pdserve serve` of a configuration."""

    sections: Mapping[str, Any]
    """Ports, NATS and etcd are chosen at the start."""

    @asynccontextmanager
    async def start(self, folder: Path) -> AsyncIterator[Endpoint]:
        async with started(write(self.sections, folder / "system.yaml"), folder, _quiet) as running:
            yield Endpoint(running.graph.url, running.graph.model)


def _quiet(_: str) -> None:
    """Discard progress lines about slow starts."""
