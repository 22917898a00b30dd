"""A graph with two frontends on one port, NATS with TLS: API keys."""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from pdserve.ports import free_port
from tests.serving import Serve, kv_ports, running, until

YAML = """
Common: {{model: demo, block-size: 32, max-model-len: 4096}}
Graph: {{kv-port: {kv_port}, drain-timeout: 5}}
Security: {{api-keys: keys.yaml}}
Frontend: {{served_model_name: demo, port: {port}, ServiceArgs: {{workers: 2}}}}
VllmWorker: {{engine: sim, common-configs: [model, block-size, max-model-len]}}
"""
ALICE, BOB, CAROL = "sk-alice-0123456789", "sk-bob-0123456789ab", "sk-carol-0123456789"
KEYS = {
    "alice": f"{{key: {ALICE}, requests-per-minute: 30}}",
    "bob": f"{{key: {BOB}, concurrent-requests: 2}}",
    "carol": f"{{key: {CAROL}}}",
}
BODY = {"model": "demo", "prompt": "Hi", "max_tokens": 1, "ignore_eos": True}
CLIENT = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=60)


class Keys:
    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, *names: str) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.touch(0o600)
        fresh.write_text("".join(f"{name}: {KEYS[name]}\n" for name in names))
        os.replace(fresh, self._file)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "keys.yaml")


@pytest.fixture(scope="module")
def graph(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    folder, port = keys._file.parent, free_port("127.0.0.1")
    keys.write("alice", "bob", "carol")
    serve = Serve(folder, YAML.format(port=port, kv_port=kv_ports()), port=port)
    with running(serve):
        until(lambda: len(frontends(serve)) == 2, serve)
        yield serve


def frontends(serve: Serve) -> set[str]:
    """That answer on the port: each connection comes to one of them, by chance."""
    return {serve.health()["frontend"] for _ in range(20)}


def ask(serve: Serve, key: str) -> httpx.Response:
    """On a connection of its own, which comes to any of the frontends."""
    return CLIENT.post(f"{serve.url}/v1/completions", json=BODY, headers=header(key))


def codes(serve: Serve, key: str) -> set[int]:
    """Of eight requests: both frontends have answered, but for 1 time in 128."""
    return {ask(serve, key).status_code for _ in range(8)}


def long_answer(serve: Serve, key: str, tokens: int = 4000) -> "AbstractContextManager[httpx.Response]":
    """A stream that has begun, and whose tokens take 5 ms each."""
    body = {**BODY, "max_tokens": tokens, "stream": True}
    return CLIENT.stream("POST", f"{serve.url}/v1/completions", json=body, headers=header(key))


def header(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_both_frontends_together_give_the_rate_of_a_limit(graph: Serve) -> None:
    """Each has a minute's worth at first, and one more every 4 seconds."""
    started, taken, refused = time.monotonic(), 0, list[httpx.Response]()
    while len(refused) < 10:
        answer = ask(graph, ALICE)
        assert answer.status_code in (200, 429)
        taken += answer.status_code == 200
        refused += [answer] * (answer.status_code == 429)
    assert 30 <= taken <= 60 + (time.monotonic() - started) / 2 + 2
    assert 0 < int(refused[-1].headers["retry-after"]) <= 4
    assert refused[-1].headers["x-ratelimit-remaining-requests"] == "0"


def test_a_key_that_is_taken_away_works_no_more_and_its_requests_end_well(graph: Serve, keys: Keys) -> None:
    with long_answer(graph, CAROL, 1000) as answer:
        keys.write("alice", "bob")
        until(lambda: codes(graph, CAROL) == {401}, graph)
        assert answer.read().endswith(b"data: [DONE]\n\n")
    assert ask(graph, BOB).status_code == 200


def test_keys_are_nowhere_but_in_their_file(graph: Serve) -> None:
    ask(graph, BOB)
    until(lambda: "key=bob" in graph.text, graph)
    pages = [httpx.get(f"{graph.url}/{page}", timeout=30).text for page in ("health", "metrics")]
    said = [graph.text, *pages]
    for process in graph.processes():
        said += [str(process.environ()), *process.cmdline()]
    assert re.search(r'pdserve_key_requests_total{instance="frontend-[^"]+",code="200",key="bob"}', pages[1])
    assert not [text for text in said for key in (ALICE, BOB, CAROL) if key in text]


def test_the_banner_has_a_curl_that_works_with_a_key(graph: Serve) -> None:
    command = graph.text[graph.text.index("curl ") :].split("}'")[0] + "}'"
    env = os.environ | {"KEY": BOB}
    result = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("data: [DONE]")
