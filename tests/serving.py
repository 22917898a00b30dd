"""A graph as a user runs it: `pdserve serve` with simulated engines in a folder of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from pdserve.ports import free_port

PDSERVE = [sys.executable, "-m", "pdserve"]
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
FRONTEND = "Frontend: {{served_model_name: demo, port: {port}}}\n"
LONG = " ".join(f"The code of the red box is {code}." for code in range(1000, 1030))


class Serve:
    """One run of `pdserve serve`, its output in a file."""

    def __init__(self, folder: Path, yaml: str, *options: str, port: int = 0) -> None:
        self.folder, self.port = folder, port
        self.file, self.log = folder / "graph.yaml", folder / "log"
        self.file.write_text(yaml)
        self.command = [*PDSERVE, "serve", "-f", str(self.file), *options]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
        self.env = {**clean, "PDSERVE_STATE_DIR": str(folder / "state")}

    def start(self) -> "subprocess.Popen[bytes]":
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0
            )
        return self.process

    def pdserve(self, *args: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*PDSERVE, *args],
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def processes(self) -> list[psutil.Process]:
        """Everything of this graph that lives: all of it has the state directory in its environment."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("PDSERVE_STATE_DIR") == self.env["PDSERVE_STATE_DIR"]
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def health(self) -> dict[str, Any]:
        """Of a graph that serves: raises where the answer is not 200."""
        answer = httpx.get(f"{self.url}/health", timeout=30).raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def chat(self, prompt: str = LONG) -> tuple[httpx.Response, list[str]]:
        """The response to a streaming chat, and the content of its chunks."""
        messages = [{"role": "user", "content": prompt}]
        body = {"model": "demo", "messages": messages, "max_tokens": 8, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=60) as response:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events[-1] == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
        return response, [delta["content"] for delta in deltas if delta.get("content")]


def until(condition: Callable[[], object], serve: Serve, within: float = 90) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, serve.text[-5000:]
        time.sleep(0.05)


def kv_ports() -> int:
    """The first of as many ports as a graph here has workers."""
    return free_port("127.0.0.1", 8)
