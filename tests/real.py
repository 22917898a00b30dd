"""Real engines for all tests of a session: one graph, and one plain vLLM server with the same arguments, to compare
with. Both use float32, because in bfloat16 near ties depend on the rest of the batch (docs/decisions/0005)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from anyio.from_thread import start_blocking_portal
from pdserve_bench.graphs.launch import plain_vllm

from pdserve.demo import MODEL_DIR
from pdserve.util.net import free_port
from tests.e2e.graph import RealGraph, serving

GRAPH = """
Graph:
  kv-port: {kv_port}
Common:
  model: demo
  block-size: 32
  max-model-len: 4096
  dtype: float32
Frontend:
  served_model_name: demo
  port: {port}
VllmWorker:
  remote-prefill: true
  conditional-disagg: true
  max-local-prefill-length: 128
  max-prefill-queue-size: 16
  common-configs: [model, block-size, max-model-len, dtype]
PrefillWorker:
  common-configs: [model, block-size, max-model-len, dtype]
"""
ARGUMENTS = (
    "--dtype float32 --block-size 32 --max-model-len 4096 --enforce-eager --served-model-name demo "
    "--max-num-batched-tokens 32768 --distributed-executor-backend uni"
)
"""Arguments of vLLM's server: as in `GRAPH`. Its steps are so large that no prompt is computed in chunks: on a CPU,
vLLM 0.32 crashes at a chunk of a request with a seed (engine/vllm/worker.py prevents this in pdserve)."""
IN_CORE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Makes vLLM keep the executor `uni` on a CPU. Otherwise the model gets its own process, and after each message, both
processes spin for a second."""
KEY = "the-key-of-the-reference"
"""API key of vLLM's server, for tests of requests without a key. The graph has no keys."""


@dataclass(frozen=True)
class Reference:
    """vLLM's own OpenAI server."""

    url: str

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=300)


def graph_yaml() -> str:
    return GRAPH.format(port=free_port("127.0.0.1"), kv_port=free_port("127.0.0.1", 2))


@contextmanager
def one_graph(folder: Path) -> Iterator[RealGraph]:
    with serving(graph_yaml(), folder) as graph:
        yield graph


@contextmanager
def one_vllm(
    folder: Path,
    model: Path = MODEL_DIR,
    arguments: Sequence[str] = tuple(ARGUMENTS.split()),
    variables: Mapping[str, str] | None = None,
) -> Iterator[Reference]:
    arguments = [*arguments, "--api-key", KEY]
    # a short folder for vLLM's sockets, because their paths have at most 107 characters
    with TemporaryDirectory(prefix="vllm-") as sockets, start_blocking_portal() as portal:
        given = IN_CORE | {"VLLM_RPC_BASE_PATH": sockets} | dict(variables or {})
        server = plain_vllm(model, arguments, folder, lambda _: None, given)
        with portal.wrap_async_context_manager(server) as url:
            yield Reference(url)
