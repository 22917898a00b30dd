"""A whole pdserve graph as a user starts it: `pdserve serve -f FILE` in a process of its own, real engines."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from pdserve.config.load import load
from pdserve.frontend.pages import KEPT

_START_SECONDS = 420.0


@dataclass
class Graph:
    """A running graph; `log` has everything it printed so far."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    env: dict[str, str]
    _kept_until: float = 0.0

    def pdserve(self, *args: str) -> "subprocess.CompletedProcess[str]":
        """Run another pdserve command against this graph."""
        command = [sys.executable, "-m", "pdserve", *args]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)

    def metrics(self) -> "Metrics":
        """The frontend's merged page as it is now. It is made once a second at most: one that may be that of the call
        before is not asked for."""
        time.sleep(max(0.0, self._kept_until - time.monotonic()))
        page = httpx.get(f"{self.url}/metrics", timeout=30).text
        self._kept_until = time.monotonic() + KEPT + 0.1
        return Metrics(page)


@dataclass
class Metrics:
    page: str

    def __call__(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples over all instances; 0 where absent."""
        from prometheus_client.parser import text_string_to_metric_families

        return sum(
            sample.value
            for family in text_string_to_metric_families(self.page)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@contextmanager
def serving(yaml: str, folder: Path) -> Iterator[Graph]:
    """Start a graph from `yaml`, wait until it answers, and stop it as Ctrl-C would; its exit code must be 0."""
    path, log = folder / "graph.yaml", folder / "serve.log"
    path.write_text(yaml)
    env = {**os.environ, "PDSERVE_STATE_DIR": str(folder / "state"), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as out:
        # The default session, but a group of its own: a session would get its own scheduling group (FACTS).
        process = subprocess.Popen(
            [sys.executable, "-m", "pdserve", "serve", "-f", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            process_group=0,
        )
    frontend = load(path, env).frontend
    assert frontend is not None
    graph = Graph(f"http://127.0.0.1:{frontend.port}", process, log, env)
    try:
        _wait_until_ready(graph)
        yield graph
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=90)
    assert code == 0, log.read_text()[-4000:]


def _wait_until_ready(graph: Graph) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if graph.process.poll() is not None:
            break
        if "Ready" in graph.log.read_text(errors="replace"):
            return
        time.sleep(0.5)
    raise AssertionError(f"the graph did not come up:\n{graph.log.read_text(errors='replace')[-6000:]}")
