"""Workers are killed all the time, also while they start, and at last `serve` itself: requests are answered."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import httpx
import psutil
import pytest

from pdserve.ports import free_port
from tests.serving import FRONTEND, LONG, WORKERS, Serve, kv_ports, until

TOKENS = 25
"""half a second of a simulated engine"""
KILLS, EVERY, CLIENTS = 10, 1.5, 4


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A frontend and two workers of each role. The last test kills its supervisor."""
    port = free_port("127.0.0.1")
    yaml = (FRONTEND + WORKERS).replace("PrefillWorker: {{", "PrefillWorker: {{ServiceArgs: {{workers: 2}}, ")
    yaml = yaml.replace("engine: sim", "engine: sim\n  additional-config: {{sim: {{step-seconds: 0.02}}}}", 1)
    yaml = yaml.replace("timeout: 5", "timeout: 20").format(port=port, kv_port=kv_ports(), workers=2)
    serve = Serve(tmp_path_factory.mktemp("graph"), yaml, "--log-format", "json", port=port)
    process = serve.start()
    try:
        until(lambda: serve.ready() or process.poll() is not None, serve, 240)
        assert process.poll() is None, serve.text[-5000:]
        yield serve
    finally:
        process.kill()
        process.wait()


def test_json_lines(graph: Serve) -> None:
    lines = [json.loads(line) for line in graph.text.splitlines()[:-1]]
    assert {"serve", "frontend-0", "decode-0", "prefill-1"} <= {line["role"] for line in lines}


def test_two_of_each_under_random_kills(graph: Serve) -> None:
    """Every 1.5 s a worker is killed that may just be starting: many starts in a row do not end."""
    answers = _under_kills(graph, random.Random(7))
    assert graph.process.poll() is None, graph.text[-5000:]
    until(lambda: graph.health()["status"] == "ok", graph)
    slots = json.loads(graph.pdserve("status", "--json").stdout)["slots"]
    assert sum(slot["restarts"] for slot in slots) > KILLS / 2
    assert set(answers) == {(200, TOKENS)}, answers


def test_requests_finish_when_serve_is_killed(graph: Serve) -> None:
    """Its guardian stops the graph as it would have done itself: the servers last."""
    streams = [Stream(graph, 200) for _ in range(6)]
    for stream in streams:
        assert stream.begun.wait(60)
    graph.process.kill()
    graph.process.wait()
    for stream in streams:
        stream.join(60)
    assert [stream.tokens for stream in streams] == [200] * 6
    assert max(stream.pause for stream in streams) < 10, "nothing has to be noticed, or started again"
    until(lambda: not graph.processes(), graph)
    assert graph.pdserve("status").returncode == 1


class Stream(threading.Thread):
    """A completion that is being read, its prompt long enough to be prefilled remotely."""

    def __init__(self, serve: Serve, tokens: int) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.tokens, self.pause = 0, 0.0
        self._url = f"{serve.url}/v1/completions"
        self._body = {
            "model": "demo",
            "prompt": LONG,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
            last = time.monotonic()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    usage = json.loads(line[6:]).get("usage")
                    self.tokens = usage["completion_tokens"] if usage else 0
                    if self.begun.is_set():
                        self.pause = max(self.pause, time.monotonic() - last)
                    last = time.monotonic()
                    self.begun.set()


def _under_kills(serve: Serve, chance: random.Random) -> Counter[tuple[int, int]]:
    """How often which answer came, as (status, tokens), from clients that ask all the time."""
    answers: Counter[tuple[int, int]] = Counter()
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            body = {"model": "demo", "prompt": LONG, "max_tokens": TOKENS, "ignore_eos": True}
            answer = httpx.post(f"{serve.url}/v1/completions", json=body, timeout=120)
            tokens = answer.json()["usage"]["completion_tokens"] if answer.status_code == 200 else 0
            answers[answer.status_code, tokens] += 1

    clients = [threading.Thread(target=ask) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        for _ in range(KILLS):
            until(lambda: _kill_one(serve, chance), serve)
            time.sleep(EVERY)
        until(lambda: answers.total() > 20, serve)
    finally:
        over.set()
        for client in clients:
            client.join()
    return answers


def _kill_one(serve: Serve, chance: random.Random) -> bool:
    """Of both roles, ready or starting; whether there was any."""
    with suppress(psutil.Error):  # it has just ended
        workers = [one for one in serve.processes() if {"decode", "prefill"} & set(one.cmdline()[3:4])]
        if workers:
            chance.choice(workers).kill()
            return True
    return False
