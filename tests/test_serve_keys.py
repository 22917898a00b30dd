"""API keys of a graph with two frontends on one port."""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from pdserve.ports import free_port
from tests.serving import Serve, kv_ports, processes_below, running, until

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
DECODES = "prefill local (disabled)"
"""in the log, of each request that comes to the decode worker"""
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
    with running(serve, within=240):  # two frontends that import vLLM at the same time
        until(lambda: len(frontends(serve)) == 2, serve)
        yield serve


def frontends(serve: Serve) -> set[str]:
    """That answer on the port: each connection comes to one of them, by chance."""
    return {serve.health()["frontend"] for _ in range(20)}


def ask(serve: Serve, key: str, tokens: int = 1, prompt: str = "Hi") -> httpx.Response:
    """On a connection of its own, which comes to any of the frontends."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    header = {"authorization": f"Bearer {key}"}
    return CLIENT.post(f"{serve.url}/v1/completions", json=body, headers=header)


def test_a_limit_holds_over_both_frontends(graph: Serve) -> None:
    """Each alone would let 30 requests through, and one more every 2 seconds."""
    started, answers = time.monotonic(), list[httpx.Response]()
    while [answer.status_code for answer in answers[-5:]] != [429] * 5:
        answers.append(ask(graph, ALICE))
        time.sleep(0.05)  # faster than they tell each other, each may let all of it through
        assert len(answers) < 100
    taken = time.monotonic() - started
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 429}
    assert 30 <= codes.count(200) <= 30 + taken / 2 + 10
    assert 0 < int(answers[-1].headers["retry-after"]) < 20
    assert answers[-1].headers["x-ratelimit-remaining-requests"] == "0"


def test_concurrent_requests_count_at_both(graph: Serve) -> None:
    """Two long ones that are at both or at one: after a second every further one is refused at each."""
    begun = graph.text.count(DECODES)
    with ThreadPoolExecutor(2) as pool:
        long = [pool.submit(ask, graph, BOB, 1500) for _ in range(2)]
        until(
            lambda: graph.text.count(DECODES) >= begun + 2, graph
        )  # a short one may take the place of a long one
        until(lambda: [ask(graph, BOB).status_code for _ in range(8)] == [429] * 8, graph, 30)
        assert not any(each.done() for each in long)
        assert [each.result().status_code for each in long] == [200, 200]
    until(lambda: [ask(graph, BOB).status_code for _ in range(8)] == [200] * 8, graph, 30)


def test_a_key_that_is_taken_away_works_no_more_and_its_requests_end_well(graph: Serve, keys: Keys) -> None:
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, graph, CAROL, 1500)
        until(lambda: "pdserve_key" in httpx.get(f"{graph.url}/metrics", timeout=30).text, graph)
        keys.write("alice", "bob")
        until(lambda: [ask(graph, CAROL).status_code for _ in range(8)] == [401] * 8, graph, 10)
        assert long.result().status_code == 200
    assert ask(graph, BOB).status_code == 200


def test_keys_are_nowhere_but_in_their_file(graph: Serve) -> None:
    ask(graph, BOB)
    until(lambda: "key=bob" in graph.text, graph)
    pages = [httpx.get(f"{graph.url}/{page}", timeout=30).text for page in ("health", "metrics")]
    said = [graph.text, *pages, *(str(process.environ()) for process in processes_below(graph.folder))]
    said += [" ".join(process.cmdline()) for process in processes_below(graph.folder)]
    assert re.search(r'pdserve_key_requests_total{instance="frontend-[^"]+",code="200",key="bob"}', pages[1])
    assert not [text for text in said for key in (ALICE, BOB, CAROL) if key in text]


def test_the_banner_has_a_curl_that_works_with_a_key(graph: Serve) -> None:
    command = graph.text[graph.text.index("curl ") :].split("}'")[0] + "}'"
    env = os.environ | {"KEY": BOB}
    result = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("data: [DONE]")


def test_a_mistake_in_the_file_ends_the_start_at_once(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(f"alice: {{key: {ALICE}, request-per-minute: 3}}")
    serve = Serve(tmp_path, YAML.format(port=free_port("127.0.0.1"), kv_port=kv_ports()))
    assert serve.start().wait(60) == 2
    assert (
        f"{tmp_path}/keys.yaml:1: alice.request-per-minute is not a key of an API key: did you mean"
        in serve.text
    )
    assert "frontend-0" not in serve.text
