"""A decode worker with two ranks on two hosts reads KV from a prefill worker with one rank and generates the tokens of
one engine. When one of its hosts loses power, its requests continue at the prefill worker, which stands in."""

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest
from pdserve_bench.hosts.network import Host, HostProcess, Network

from pdserve.supervisor.servers.embedded import etcd_binary, nats_binary
from tests.network import hosts

YAML = """
Common: {{model: demo, block-size: 32, max-model-len: 1024, dtype: float32}}
Graph: {{nats: "nats://{servers}:4222", etcd: "{servers}:2379"}}
Security: {{allow: [plain-graph, no-keys, plain-http]}}
Frontend: {{served_model_name: demo, host: 0.0.0.0, port: 8000}}
VllmWorker:
  remote-prefill: true
  max-local-prefill-length: 32
  tensor-parallel-size: 2
  nnodes: 2
  common-configs: [model, block-size, max-model-len, dtype]
PrefillWorker: {{common-configs: [model, block-size, max-model-len, dtype]}}
"""
ENV = {"UCX_TLS": "tcp", "RES_OPTIONS": "timeout:1 attempts:1", "TORCH_COMPILE_DISABLE": "1"}
"""Between namespaces, UCX cannot use shared memory and no name server responds. Hosts have no compiler cache."""
PROMPTS = [" ".join(f"The code of the red box is {code}." for code in range(n, n + 8)) for n in (1000, 2000)]
WARM_UP = "The code of the red box is unknown. " * 8
TOKENS = 500


class Spanning:
    def __init__(self, net: Network, folder: Path) -> None:
        self.net, self._folder = net, folder
        servers = net.host("servers")
        self.url = f"http://{servers.address}:8000"
        self._file = folder / "graph.yaml"
        self._file.write_text(YAML.format(servers=servers.address))
        urls = (
            "--listen-client-urls",
            "http://0.0.0.0:2379",
            "--advertise-client-urls",
            "http://0.0.0.0:2379",
        )
        data = str(servers.folder)
        servers.start([str(nats_binary()), "-js", "-sd", f"{data}/nats"], folder / "nats.log")
        servers.start([str(etcd_binary()), "--data-dir", f"{data}/etcd", *urls], folder / "etcd.log")
        self.start(servers, "frontend")
        self.follower = self.start(net.host("b"), "decode", "--node-rank", "1")
        self.leader = self.start(net.host("a"), "decode")
        self.prefill = self.start(net.host("p"), "prefill")

    def start(self, host: Host, role: str, *options: str) -> HostProcess:
        command = [sys.executable, "-m", "pdserve", role, "-f", str(self._file), *options]
        env = ENV | {"PDSERVE_HOST": host.address, "PDSERVE_STATE_DIR": str(host.folder / "state")}
        return host.start(command, self._folder / f"{host.name}.log", env)

    def ask(self, prompt: str, tokens: int = 16) -> httpx.Response:
        body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)

    def until_both_sides_work(self) -> None:
        deadline = time.monotonic() + 240
        for number in count():
            try:
                headers = self.ask(f"{number} {WARM_UP}", 1).headers
                if headers.get("x-pdserve-prefill") == "remote":
                    return
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline, self._said()
            assert not [each.poll() for each in (self.leader, self.follower) if each.poll()], self._said()
            time.sleep(0.2)

    def _said(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in self._folder.glob("*.log"))


@pytest.fixture
def spanning(tmp_path: Path) -> Iterator[Spanning]:
    with hosts(tmp_path) as net:
        yield Spanning(net, tmp_path)


def test_requests_of_a_worker_on_two_hosts_survive_a_lost_host(spanning: Spanning) -> None:
    spanning.until_both_sides_work()
    answers = [spanning.ask(prompt) for prompt in PROMPTS]
    assert {answer.headers["x-pdserve-prefill"] for answer in answers} == {"remote"}
    begun, text = threading.Event(), list[str]()

    def read() -> None:
        body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{spanning.url}/v1/completions", json=body, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    spanning.net.hosts["b"].vanish()
    assert spanning.leader.wait(90) == 1
    reader.join(120)
    assert not reader.is_alive()
    alone = spanning.ask(PROMPTS[0], TOKENS)
    assert alone.headers["x-pdserve-instance"].startswith("prefill-0")
    assert "".join(text) == alone.json()["choices"][0]["text"]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert spanning.ask(prompt).json()["choices"] == answer.json()["choices"]
    spanning.prefill.signal(signal.SIGTERM)
    assert spanning.prefill.wait(60) == 0
