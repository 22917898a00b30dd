"""A graph as a user runs it: `pdserve serve` with simulated engines in its own folder."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from pdserve_bench.graphs.launch import PDSERVE, ServeRun

from pdserve.util.net import free_port

WORKERS = """
Common: {{model: demo, block-size: 32, max-model-len: 4096}}
Graph: {{kv-port: {kv_port}, drain-timeout: 5}}
VllmWorker:
  engine: sim
  remote-prefill: true
  max-local-prefill-length: 64
  common-configs: [model, block-size, max-model-len]
  ServiceArgs: {{workers: {workers}}}
PrefillWorker: {{engine: sim, common-configs: [model, block-size, max-model-len]}}
"""
LONG = " ".join(f"The code of the red box is {code}." for code in range(1000, 1030))


class Serve(ServeRun):
    """One run of `pdserve serve`, without the tests' own PDSERVE_ variables."""

    def __init__(
        self, folder: Path, yaml: str, *options: str, port: int = 0, headers: Mapping[str, str] | None = None
    ) -> None:
        file = folder / "graph.yaml"
        file.write_text(yaml)
        super().__init__(folder, file, *options)
        self.port, self.headers = port, dict(headers or {})
        kept = ("PDSERVE_STATE_DIR",)
        self.env = {k: v for k, v in self.env.items() if not k.startswith("PDSERVE_") or k in kept}

    def pdserve(self, *args: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*PDSERVE, *args],
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def health(self) -> dict[str, Any]:
        """Return the body of `/health`; raise unless the answer is 200."""
        answer = httpx.get(f"{self.url}/health", timeout=30).raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def chat(self, prompt: str = LONG) -> tuple[httpx.Response, list[str]]:
        """The response to a streaming chat, and the content of its chunks."""
        messages = [{"role": "user", "content": prompt}]
        body = {"model": "demo", "messages": messages, "max_tokens": 8, "stream": True}
        url = f"{self.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=self.headers, timeout=60) as response:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events[-1] == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
        return response, [delta["content"] for delta in deltas if delta.get("content")]


@contextmanager
def running(serve: Serve, within: float = 240) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the graph, yield when it is ready, then stop it as by Ctrl-C; its exit code must be 0."""
    process = serve.start()
    try:
        until(lambda: serve.ready() or process.poll() is not None, serve, within)
        assert process.poll() is None, serve.text[-5000:]
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(120)
    assert code == 0, serve.text[-5000:]


def until(condition: Callable[[], object], serve: Serve, within: float = 90) -> None:
    """Wait until the condition holds; fails with the end of the graph's output after `within` seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, serve.text[-5000:]
        time.sleep(0.05)


def processes_below(folder: Path) -> list[psutil.Process]:
    """The processes of all graphs whose state directory is below this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.environ().get("PDSERVE_STATE_DIR", ""):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kv_ports() -> int:
    """The first of eight free ports, for the workers of a graph."""
    return free_port("127.0.0.1", 8)
