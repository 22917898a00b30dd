"""One real graph and one reference run serve all end-to-end tests of a session."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.ports import free_port
from tests.e2e.cases import Case, identity_cases
from tests.e2e.graph import Graph, serving

# float32: in bfloat16 a near tie falls one way or the other with what else is in the batch. In 2 of some 900 answers of
# random prompts under load something did, in none of 589 in float32 (docs/decisions/0005).
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
  ServiceArgs: {{workers: {decode}}}
  common-configs: [model, block-size, max-model-len, dtype]
PrefillWorker:
  ServiceArgs: {{workers: {prefill}}}
  common-configs: [model, block-size, max-model-len, dtype]
"""


@pytest.fixture(scope="session")
def plain_engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """What a plain vLLM engine says to every identity case: `alone`, and `together` in shared batches."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "in.json").write_text(json.dumps([case.as_dict() for case in identity_cases()]))
    command = [sys.executable, "-m", "tests.e2e.reference", str(folder / "in.json"), str(folder / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, list[list[int]]] = json.loads((folder / "out.json").read_text())
    return answers


@pytest.fixture(scope="session")
def reference(plain_engine: dict[str, list[list[int]]]) -> dict[str, list[int]]:
    """Greedy tokens of a plain vLLM engine for every identity case, by the case's name."""
    return {case.name: ids for case, ids in zip(identity_cases(), plain_engine["alone"], strict=True)}


@pytest.fixture(scope="session")
def graph(tmp_path_factory: pytest.TempPathFactory, reference: dict[str, list[int]]) -> Iterator[Graph]:
    # `reference` comes first so that three engines never load at once on a small machine.
    del reference
    folder: Path = tmp_path_factory.mktemp("graph")
    yaml = GRAPH.format(port=free_port("127.0.0.1"), kv_port=free_port("127.0.0.1", 2), decode=1, prefill=1)
    with serving(yaml, folder) as graph:
        yield graph


@pytest.fixture(scope="session")
def cases() -> list[Case]:
    return identity_cases()
