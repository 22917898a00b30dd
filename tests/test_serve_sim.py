"""`pdserve serve` as a user runs it, with simulated engines: real processes, real NATS and etcd, no model. Also API
keys with two frontends on one port."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pdserve_bench.graphs.launch import PDSERVE

from pdserve.contract.records import Role
from pdserve.util.net import find_port_holder, free_port
from tests.deploy.dashboard import expressions
from tests.deploy.prometheus import promtool, scraping
from tests.listeners import listeners
from tests.serving import LONG, WORKERS, Serve, kv_ports, running, until
from tests.terminal import Terminal

FRONTENDS = """
Security: {{api-keys: keys.yaml}}
Frontend: {{served_model_name: demo, port: {port}, batches: {batches}, ServiceArgs: {{workers: 2}}}}
Slo: {{ttft: 10s}}
"""
KEYS = {
    "alice": "{key: sk-alice-0123456789, requests-per-minute: 30}",
    "bob": "{key: sk-bob-0123456789ab, admin: true}",
    "carol": "{key: sk-carol-0123456789}",
}
ALICE, BOB, CAROL = (re.findall("sk-[^,}]+", key)[0] for key in KEYS.values())


class KeyedServe(Serve):
    """A run with API keys in a file. Each request has a new connection, which reaches any of the frontends."""

    def write_keys(self, *names: str) -> None:
        fresh = self.folder / "keys.new"
        fresh.touch(0o600)
        fresh.write_text("".join(f"{name}: {KEYS[name]}\n" for name in names))
        os.replace(fresh, self.folder / "keys.yaml")

    def complete(self, key: str) -> httpx.Response:
        body = {"model": "demo", "prompt": "Hi", "max_tokens": 1, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=bearer(key), timeout=60)

    def run_batch(self, key: str) -> None:
        """Start a batch of one request."""
        body = {"model": "demo", "prompt": "Hi", "max_tokens": 1}
        line = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body}
        with httpx.Client(base_url=f"{self.url}/v1", headers=bearer(key), timeout=60) as http:
            file = http.post(
                "/files", data={"purpose": "batch"}, files={"file": json.dumps(line).encode()}
            ).json()
            batch = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
            http.post("/batches", json=batch).raise_for_status()

    def frontends(self) -> set[str]:
        """The frontends that answer on the port."""
        return {self.health()["frontend"] for _ in range(20)}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServe]:
    """Two frontends, two decode workers, a prefill worker, each role with another clock. Ctrl-C ends the graph with
    exit code 0 and leaves nothing."""
    port = free_port("127.0.0.1")
    folder = tmp_path_factory.mktemp("graph")
    yaml = (FRONTENDS + WORKERS).format(port=port, batches=folder / "batches", kv_port=kv_ports(), workers=2)
    serve = KeyedServe(folder, yaml, port=port, headers=bearer(BOB))
    serve.env |= {"PDSERVE_CLOCK_OFFSET_PREFILL": "-40", "PDSERVE_CLOCK_OFFSET_DECODE": "5"}
    serve.write_keys(*KEYS)
    with running(serve):
        until(lambda: len(serve.frontends()) == 2, serve)
        yield serve
    assert "nothing is left running" in serve.text
    assert serve.processes() == []
    assert find_port_holder("127.0.0.1", port) is None
    assert serve.pdserve("status").returncode == 1


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """A graph without frontends. It starts quickly, because nothing imports vLLM."""
    return Serve(tmp_path, WORKERS.format(kv_port=kv_ports(), workers=1))


def test_the_banner_has_commands_that_work_as_typed(graph: KeyedServe) -> None:
    curl = graph.text[graph.text.index("curl ") :].split("}'")[0] + "}'"
    look = graph.text.partition("Look at it:\n")[2].splitlines()[0]

    def typed(command: str) -> str:
        env = graph.env | {"KEY": BOB}
        shown = subprocess.run(
            ["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60, check=True
        )
        return shown.stdout

    answer = typed(curl)
    assert "x-pdserve-prefill: remote" in answer
    assert answer.rstrip().endswith("data: [DONE]")
    assert "prefill-0" in typed(look)


def test_status_lists_all_instances(graph: KeyedServe) -> None:
    state = json.loads(graph.pdserve("status", "--json").stdout)
    keys = "etcd namespace url queue_depth queue_limit instances models slots settings moments receipts outages gone "
    keys += "problems"
    assert set(state) == set(keys.split())
    roles = [instance["role"] for instance in state["instances"]]
    assert roles == ["frontend", "frontend", "decode", "decode", "prefill"]
    assert state["url"] == graph.url
    assert [len(cards) for cards in state["models"].values()] == [3], "the prefill worker keeps a copy"
    table = graph.pdserve("status", "-f", str(graph.file)).stdout
    for instance in state["instances"]:
        assert re.search(rf"^ *{instance['id']} +ready\b", table, re.M), table
    assert re.search(r"model +demo, 2 decode workers", table)


def test_only_known_ports_listen(graph: KeyedServe) -> None:
    """They listen on loopback only, because the file names no other host (docs/security.md). Other users of the machine
    cannot read the graph's files."""
    assert listeners(graph) == {
        ("frontend", "HTTP"): 2,
        ("frontend", "pages"): 2,
        ("decode", "tls"): 2,
        ("decode", "pages"): 2,
        ("decode", "TCP"): 2,  # simulated KV
        ("prefill", "tls"): 1,
        ("prefill", "pages"): 1,
        ("prefill", "TCP"): 1,  # simulated KV
        ("nats-server", "clients"): 1,
        ("etcd", "clients"): 1,
        ("etcd", "TCP"): 1,  # for other etcd members
    }
    state_dir = Path(graph.env["PDSERVE_STATE_DIR"])
    for name in ("", "credentials", "logs", "servers/nats", "servers/etcd", "graph.json"):
        assert (state_dir / name).stat().st_mode & 0o077 == 0, name


def test_a_trace_shows_where_a_request_went(graph: KeyedServe) -> None:
    prompt = f"Where does this one go? {LONG}"  # a prompt that no worker has cached
    request_id = graph.chat(prompt)[0].headers["x-request-id"]
    shown = graph.pdserve("trace", f"chatcmpl-{request_id}").stdout
    assert re.search(rf"request id +{request_id}", shown)
    assert re.search("prefill +remote", shown)
    for hop, where in (("prefill", "prefill-0"), ("decode", "decode-")):
        assert re.search(rf"^ {hop} .* m?s +{where}", shown, re.M), shown
    (found,) = (json.loads(graph.pdserve("trace", request_id[:12], "--json").stdout),)
    assert (found["request_id"], found["status"]) == (request_id, 200)
    assert request_id in graph.pdserve("trace").stdout
    assert request_id in {receipt["request_id"] for receipt in json.loads(_status(graph))["receipts"]}
    unknown = graph.pdserve("trace", "f" * 32)
    assert unknown.returncode == 1
    assert "no frontend has a receipt of ffff" in unknown.stderr


def test_a_setting_reaches_the_workers(graph: KeyedServe) -> None:
    assert graph.pdserve("set", "max-local-prefill-length=4000").returncode == 0
    until(lambda: graph.text.count("max-local-prefill-length 4000") == 2, graph)
    assert graph.chat()[0].headers["x-pdserve-prefill"] == "local"
    assert graph.pdserve("set", "--unset", "max-local-prefill-length").returncode == 0
    until(lambda: graph.text.count("settings now: policy threshold, max-local-prefill-length 64") == 2, graph)


def test_live_settings_stay_with_their_file(serve: Serve, tmp_path: Path) -> None:
    """Settings stay when their file is served again. Another file in the same state directory begins without them. The
    graphs are stopped by Ctrl-C, by closing the terminal, and by SIGINT."""
    with Terminal(serve.command, serve.env) as terminal:
        terminal.until("Ready after")
        assert "starting decode-0, prefill-0 (Ctrl-C stops)" in terminal.text
        assert serve.pdserve("set", "policy=adaptive").returncode == 0
        terminal.type("\x03")
        terminal.until("the exit code is 0")
    assert serve.processes() == []
    with Terminal(serve.command, serve.env) as terminal:
        terminal.until("Ready after")
        terminal.until("policy = adaptive (file: threshold)")
        told = serve.pdserve("set", "max-local-prefill-length=0").stdout
        assert "max-local-prefill-length = 0 (file: 64), without effect under policy adaptive" in told
        assert "set policy = adaptive (file: threshold)" in " ".join(serve.pdserve("status").stdout.split())
        terminal.hang_up()
        until(lambda: not serve.processes(), serve)
    (folder := tmp_path / "other").mkdir()
    other = Serve(folder, WORKERS.format(kv_port=kv_ports(), workers=1), "--log-format", "json")
    other.env["PDSERVE_STATE_DIR"] = serve.env["PDSERVE_STATE_DIR"]
    with running(other):
        assert f"dropped live setting policy=adaptive: it was set for {tmp_path / 'graph.yaml'}" in other.text
        assert "(file: " not in other.text
        assert "policy = threshold (as in the file)" in other.pdserve("set").stdout
        lines = [json.loads(line) for line in other.text.splitlines()[:-1]]
    assert {"serve", "decode-0", "prefill-0"} <= {line["role"] for line in lines}, "each line is JSON"


def test_status_is_drawn_again_and_leaves_the_terminal_as_it_was(graph: KeyedServe) -> None:
    with Terminal([*PDSERVE, "status", "--watch"], {**graph.env, "LINES": "60"}) as terminal:
        terminal.until("\x1b[?1049h")
        for times in (1, 2):
            terminal.until("demo, 2 decode workers", times=times)
        assert "\x1b[?1049l" not in terminal.text
        terminal.type("\x03")
        terminal.until("\x1b[?1049l")
        terminal.until("the exit code is 130")


def test_a_killed_worker_comes_back_with_its_first_configuration(graph: KeyedServe) -> None:
    """The file is changed meanwhile, which has no effect."""
    before = {instance["id"]: instance["pid"] for instance in _instances(graph)}
    victim = next(name for name in before if name.startswith("decode-0"))
    file = graph.file.read_text()
    graph.file.write_text("Graph: {no-such-key: 1}\n")
    try:
        os.kill(before[victim], signal.SIGKILL)
        until(
            lambda: (
                "decode-0@127.0.0.1" in graph.health().get("degraded", {})
                and "decode-0 is down: killed by SIGKILL" in _problems(graph)
            ),
            graph,
        )
        until(lambda: "decode-0 is ready again" in graph.text, graph)
        assert "no-such-key" not in graph.text
    finally:
        graph.file.write_text(file)
    until(lambda: "decode-0 is ready again after it ended" in _problems(graph), graph)
    until(lambda: {"status": "ok", "workers": {"demo": 2}}.items() <= graph.health().items(), graph)
    metrics = httpx.get(f"{graph.url}/metrics", timeout=30).text
    assert 'pdserve_restarts_total{instance="serve",host="127.0.0.1",slot="decode-0"} 1.0' in metrics
    assert re.search(
        r'pdserve_slot_ready{instance="frontend-\S+",host="127.0.0.1",slot="decode-0"} 1.0', metrics
    )
    (slot,) = (slot for slot in json.loads(_status(graph))["slots"] if slot["name"] == "decode-0")
    assert (slot["state"], slot["restarts"]) == ("ready", 1)
    until(lambda: len({instance["id"] for instance in _instances(graph)} - set(before)) == 1, graph)
    assert graph.chat()[1]


def test_hung_servers_are_reported_and_killed_servers_come_back(graph: KeyedServe) -> None:
    """Live settings survive, although etcd starts empty."""
    assert graph.pdserve("set", "policy=adaptive").returncode == 0
    processes = graph.processes()
    pids = {name: next(each.pid for each in processes if name in each.name()) for name in ("nats", "etcd")}
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    until(lambda: re.search("✗ NATS at [^✗]*✗ etcd at ", graph.pdserve("status").stdout), graph)
    status = graph.pdserve("status")
    assert status.returncode == 3, status.stderr
    assert all(
        name in status.stdout for name in ("frontend-0", "decode-0", "prefill-0", "demo, 2 decode workers")
    )
    assert "does not answer" in status.stdout
    assert graph.pdserve("trace", "--json").stdout.startswith("[")
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(_instances(graph)) == 5, graph)
    assert "policy = adaptive (file: threshold)" in graph.pdserve("set").stdout
    assert graph.pdserve("set", "--unset", "policy").returncode == 0
    assert graph.chat()[1]


def test_a_second_graph_on_the_same_port_is_refused(graph: KeyedServe, tmp_path: Path) -> None:
    result = graph.pdserve("serve", "-f", str(graph.file), PDSERVE_STATE_DIR=str(tmp_path))
    assert result.returncode == 2
    assert f"Port {graph.port} on 127.0.0.1 (Frontend.port) is held by" in result.stderr


def test_a_real_prometheus_finds_something_for_each_panel(graph: KeyedServe, tmp_path: Path) -> None:
    """A hung prefill worker provides the failures that some panels show."""
    numbers = count()

    def prefilled() -> str:
        """Send an uncached prompt; return where it was prefilled."""
        return graph.chat(f"{next(numbers)} and {LONG}")[0].headers["x-pdserve-prefill"]

    def panels_without_data() -> list[tuple[str, str]]:
        return [(panel, asked) for panel, asked in expressions() if not prometheus.series(asked)]

    with scraping(tmp_path, f"127.0.0.1:{graph.port}") as prometheus:
        until(lambda: prometheus.series("up == 1"), graph)
        (prefill,) = (one for one in _instances(graph) if one["role"] == "prefill")
        os.kill(prefill["pid"], signal.SIGSTOP)
        assert prefilled() == "local"
        os.kill(prefill["pid"], signal.SIGCONT)
        until(lambda: prefilled() == "remote", graph)
        graph.run_batch(BOB)
        with suppress(AssertionError):
            until(lambda: not panels_without_data(), graph, 60)
        assert panels_without_data() == []
        groups = prometheus.ask("rules")["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
        shown = (labels for labels, _ in prometheus.series('{__name__=~"pdserve_.*"}'))
        assert {labels.get("source", labels["instance"]) for labels in shown} == {
            "serve",
            *(one["id"] for one in _instances(graph)),
        }
        assert prometheus.series('pdserve_instances{role="decode"}')[0][1] == 2
        assert prometheus.series("sum(pdserve_remote_prefill_failures_total)")[0][1] >= 1
        (scrape,) = prometheus.ask("targets")["activeTargets"]
        assert (scrape["health"], scrape["lastError"]) == ("up", "")
    lint = promtool(
        "check", "metrics", said=httpx.get(f"{graph.url}/metrics", timeout=30).text
    ).stderr.splitlines()
    assert [line for line in lint if not line.startswith("vllm:")] == []


def _problems(graph: KeyedServe) -> str:
    state = httpx.get(f"{graph.url}/dashboard/state", headers=graph.headers, timeout=30)
    return str(state.json()["problems"])


def _status(graph: KeyedServe) -> str:
    return graph.pdserve("status", "--json").stdout


def _instances(graph: KeyedServe) -> list[dict[str, Any]]:
    state = _status(graph)
    found: list[dict[str, Any]] = json.loads(state)["instances"] if state else []
    return found


def test_both_frontends_together_enforce_a_rate_limit(graph: KeyedServe) -> None:
    """Each frontend accepts up to a minute's requests at once, then one every 4 seconds."""
    started, taken, refused = time.monotonic(), 0, list[httpx.Response]()
    while len(refused) < 10:
        answer = graph.complete(ALICE)
        assert answer.status_code in (200, 429)
        taken += answer.status_code == 200
        refused += [answer] * (answer.status_code == 429)
    assert 30 <= taken <= 60 + (time.monotonic() - started) / 2 + 2
    assert 0 < int(refused[-1].headers["retry-after"]) <= 4
    assert refused[-1].headers["x-ratelimit-remaining-requests"] == "0"


def test_a_removed_key_is_refused_and_its_running_requests_finish(graph: KeyedServe) -> None:
    def codes() -> set[int]:
        """The codes of eight requests, which miss a frontend 1 time in 128."""
        return {graph.complete(CAROL).status_code for _ in range(8)}

    body = {"model": "demo", "prompt": "Hi", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    url, headers = f"{graph.url}/v1/completions", bearer(CAROL)
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:  # tokens take 5 ms each
        graph.write_keys("alice", "bob")
        until(lambda: codes() == {401}, graph)
        assert answer.read().endswith(b"data: [DONE]\n\n")
    assert graph.complete(BOB).status_code == 200


def test_keys_appear_only_in_their_file(graph: KeyedServe) -> None:
    graph.complete(BOB)
    until(lambda: "key=bob" in graph.text, graph)
    pages = [httpx.get(f"{graph.url}/{page}", timeout=30).text for page in ("health", "metrics")]
    said = [graph.text, *pages]
    for process in graph.processes():
        said += [str(process.environ()), *process.cmdline()]
    assert re.search(r'pdserve_key_requests_total{instance="frontend-[^"]+",code="200",key="bob"}', pages[1])
    assert not [text for text in said for key in (ALICE, BOB, CAROL) if key in text]


def test_ctrl_c_ends_a_starting_graph_at_once(serve: Serve) -> None:
    """An engine loads in a thread that cannot be stopped. The stop waits neither for that thread nor for a drain."""
    _simulate(serve, "load-seconds: 90")
    serve.file.write_text(serve.file.read_text().replace("drain-timeout: 5", "drain-timeout: 90"))
    process = serve.start()
    until(lambda: sum(map(_handles_signals, serve.processes())) == 2, serve)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0, serve.text[-5000:]
    assert serve.processes() == []


def test_a_configuration_that_a_role_refuses_ends_the_graph(serve: Serve) -> None:
    _simulate(serve, "no-such-key: 1")
    assert serve.start().wait(240) == 2
    assert "not restarting it, because its configuration is wrong" in serve.text
    assert "sim: unknown key no_such_key" in serve.text
    assert "Traceback" not in serve.text
    assert "starts again" not in serve.text
    assert serve.processes() == []


def test_a_model_that_only_the_frontend_refuses_ends_the_graph(serve: Serve) -> None:
    """Simulated engines take any length; vLLM's app, in the frontend, knows the model's."""
    text = serve.file.read_text().replace("max-model-len: 4096", "max-model-len: 9999999")
    port = free_port("127.0.0.1")
    serve.file.write_text(f"Frontend: {{served_model_name: demo, port: {port}}}\n{text}")
    assert serve.start().wait(240) == 2
    assert "refuses the model: demo: vLLM refuses its configuration" in serve.text
    assert "9999999" in serve.text
    assert serve.processes() == []


def _simulate(serve: Serve, speeds: str) -> None:
    text = serve.file.read_text()
    serve.file.write_text(
        text.replace("engine: sim", f"engine: sim\n  additional-config: {{sim: {{{speeds}}}}}", 1)
    )


def _handles_signals(process: psutil.Process) -> bool:
    """Whether the process is a role that has set its last signal handler, the one for a dead supervisor."""
    try:
        caught = Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:")[2].split()[0]
        return process.cmdline()[3] in list(Role) and bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)
    except (OSError, IndexError, psutil.Error):
        return False
