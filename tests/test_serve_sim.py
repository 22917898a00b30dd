"""`pdserve serve` as a user runs it, with simulated engines: real processes, real NATS and etcd, no model."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pdserve_bench.launch import PDSERVE

from pdserve.credentials import create
from pdserve.ports import free_port, port_holder
from pdserve.records import Role
from tests.deploy.dashboard import expressions
from tests.deploy.prometheus import promtool, scraping
from tests.listeners import listeners
from tests.serving import FRONTEND, LONG, WORKERS, Serve, kv_ports, running, until
from tests.terminal import Terminal


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A frontend, two decode workers, a prefill worker, each role with a clock of its own. Stopped as by
    Ctrl-C: exit 0, and nothing is left."""
    port = free_port("127.0.0.1")
    yaml = (FRONTEND + WORKERS).format(port=port, kv_port=kv_ports(), workers=2)
    serve = Serve(tmp_path_factory.mktemp("graph"), yaml, port=port)
    serve.env |= {"PDSERVE_CLOCK_OFFSET_PREFILL": "-40", "PDSERVE_CLOCK_OFFSET_DECODE": "5"}
    with running(serve):
        yield serve
    assert "nothing is left running" in serve.text
    assert serve.processes() == []
    assert port_holder("127.0.0.1", port) is None
    assert serve.pdserve("status").returncode == 1


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Quick to start: nothing of vLLM is imported."""
    return Serve(tmp_path, WORKERS.format(kv_port=kv_ports(), workers=1))


@pytest.mark.parametrize(
    ("path", "asked", "field", "ranked"),
    [
        ("chat/completions", {"logprobs": True, "top_logprobs": 3}, "content", 3),
        ("chat/completions", {"logprobs": True}, "content", 0),
        ("chat/completions", {"logprobs": True, "logprob_token_ids": [400, 401]}, "content", None),
        ("chat/completions", {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}, "content", 2),
        ("completions", {"logprobs": 2}, "top_logprobs", 2),
        ("completions", {"logprobs": 2, "echo": True}, "top_logprobs", 2),
    ],
)
@pytest.mark.parametrize("prompt", ["Short.", LONG], ids=["local", "remote"])
def test_logprobs_are_answered(
    graph: Serve, path: str, asked: dict[str, Any], field: str, ranked: int | None, prompt: str
) -> None:
    said = {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
    body = {"model": "demo", "max_tokens": 4, **said, **asked}
    response = httpx.post(f"{graph.url}/v1/{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    rows = response.json()["choices"][0]["logprobs"][field]
    if "echo" in asked:
        assert rows.pop(0) is None, "the first token follows nothing"
    assert len(rows) == 4 or "echo" in asked
    for row in rows:
        tops = row if path == "completions" else row["top_logprobs"]
        assert ranked is None or len(tops) == ranked


def test_the_banner_has_a_curl_that_works(graph: Serve) -> None:
    command = graph.text[graph.text.index("curl ") :].split("}'")[0] + "}'"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert "x-pdserve-prefill: remote" in result.stdout
    assert result.stdout.rstrip().endswith("data: [DONE]")


def test_the_banner_has_a_look_that_works_as_typed(graph: Serve) -> None:
    command = graph.text.partition("Look at it:\n")[2].splitlines()[0]
    shown = subprocess.run(
        ["bash", "-c", command], env=graph.env, capture_output=True, text=True, timeout=60, check=True
    )
    assert "prefill-0" in shown.stdout


def test_status_lists_all_instances(graph: Serve) -> None:
    state = json.loads(graph.pdserve("status", "--json").stdout)
    roles = [instance["role"] for instance in state["instances"]]
    assert roles == ["frontend", "decode", "decode", "prefill"]
    assert state["url"] == graph.url
    assert [len(cards) for cards in state["models"].values()] == [3], "the prefill worker keeps a copy"
    table = graph.pdserve("status", "-f", str(graph.file)).stdout
    assert all(instance["id"] in table for instance in state["instances"])


def test_nothing_listens_but_what_is_known(graph: Serve) -> None:
    """And on the loopback device alone, where the file says nothing else. See docs/security.md."""
    assert listeners(graph) == {
        ("frontend", "HTTP"): 1,
        ("frontend", "pages"): 1,
        ("decode", "tls"): 2,
        ("decode", "pages"): 2,
        ("decode", "TCP"): 2,  # simulated KV
        ("prefill", "tls"): 1,
        ("prefill", "pages"): 1,
        ("prefill", "TCP"): 1,  # simulated KV
        ("nats-server", "clients"): 1,
        ("etcd", "clients"): 1,
        ("etcd", "TCP"): 1,  # other etcds
    }


def test_a_trace_shows_where_a_request_went(graph: Serve) -> None:
    prompt = f"Where does this one go? {LONG}"  # that no worker has in its prefix cache
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


def test_a_setting_reaches_the_workers(graph: Serve) -> None:
    assert graph.pdserve("set", "max-local-prefill-length=4000").returncode == 0
    until(lambda: graph.text.count("max-local-prefill-length 4000") == 2, graph)
    assert graph.chat()[0].headers["x-pdserve-prefill"] == "local"
    assert graph.pdserve("set", "--unset", "max-local-prefill-length").returncode == 0
    until(lambda: graph.text.count("settings now: policy threshold, max-local-prefill-length 64") == 2, graph)


def test_live_settings_are_of_one_file_and_logs_may_be_json(serve: Serve, tmp_path: Path) -> None:
    """They stay when it is served again, and say so; another file on the same state directory begins without them."""
    with running(serve):
        assert serve.pdserve("set", "policy=adaptive").returncode == 0
    again = Serve(tmp_path, WORKERS.format(kv_port=kv_ports(), workers=1))
    with running(again):
        assert "policy = adaptive (file: threshold)" in again.text
        told = again.pdserve("set", "max-local-prefill-length=0").stdout
        assert "max-local-prefill-length = 0 (file: 64), without effect under policy adaptive" in told
        shown = " ".join(again.pdserve("status").stdout.split())
        assert "set policy = adaptive (file: threshold)" in shown
    (folder := tmp_path / "other").mkdir()
    other = Serve(folder, WORKERS.format(kv_port=kv_ports(), workers=1), "--log-format", "json")
    other.env["PDSERVE_STATE_DIR"] = serve.env["PDSERVE_STATE_DIR"]
    with running(other):
        assert f"live setting policy=adaptive dropped: it was set on {tmp_path / 'graph.yaml'}" in other.text
        assert "(file: " not in other.text
        assert "policy = threshold (as in the file)" in other.pdserve("set").stdout
        lines = [json.loads(line) for line in other.text.splitlines()[:-1]]
    assert {"serve", "decode-0", "prefill-0"} <= {line["role"] for line in lines}, "each line is JSON"


def test_status_is_drawn_again_and_leaves_the_terminal_as_it_was(graph: Serve) -> None:
    with Terminal([*PDSERVE, "status", "--watch"], {**graph.env, "LINES": "60"}) as terminal:
        terminal.until("\x1b[?1049h")
        for times in (1, 2):
            terminal.until("demo, 2 decode workers", times=times)
        assert "\x1b[?1049l" not in terminal.text
        terminal.type("\x03")
        terminal.until("\x1b[?1049l")
        terminal.until("the exit code is 130")


def test_a_killed_worker_comes_back_as_a_new_instance(graph: Serve) -> None:
    before = {instance["id"]: instance["pid"] for instance in _instances(graph)}
    victim = next(name for name in before if name.startswith("decode-0"))
    os.kill(before[victim], signal.SIGKILL)
    until(
        lambda: (
            "decode-0@127.0.0.1" in graph.health().get("degraded", {})
            and "decode-0 is down: killed by SIGKILL" in _problems(graph)
        ),
        graph,
    )
    until(lambda: "decode-0 is ready again" in graph.text, graph)
    until(lambda: "decode-0 is back after its end" in _problems(graph), graph)
    until(lambda: {"status": "ok", "workers": {"demo": 2}}.items() <= graph.health().items(), graph)
    metrics = httpx.get(f"{graph.url}/metrics").text
    assert 'pdserve_restarts_total{instance="serve",host="127.0.0.1",slot="decode-0"} 1.0' in metrics
    assert 'pdserve_slot_ready{instance="serve",host="127.0.0.1",slot="decode-0"} 1.0' in metrics
    (slot,) = (slot for slot in json.loads(_status(graph))["slots"] if slot["name"] == "decode-0")
    assert (slot["state"], slot["restarts"]) == ("ready", 1)
    until(lambda: len({instance["id"] for instance in _instances(graph)} - set(before)) == 1, graph)
    assert graph.chat()[1]


def test_servers_that_hang_are_reported_and_killed_ones_come_back(graph: Serve) -> None:
    processes = graph.processes()
    pids = {name: next(each.pid for each in processes if name in each.name()) for name in ("nats", "etcd")}
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    until(lambda: re.search("✗ NATS at .*\n✗ etcd at ", graph.pdserve("status").stdout), graph)
    status = graph.pdserve("status")
    assert status.returncode == 0, status.stderr
    assert all(
        name in status.stdout for name in ("frontend-0", "decode-0", "prefill-0", "demo, 2 decode workers")
    )
    assert "does not answer" in status.stdout
    assert graph.pdserve("trace", "--json").stdout.startswith("[")
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(_instances(graph)) == 4, graph)
    assert graph.chat()[1]


def test_another_user_of_the_machine_gets_nothing(graph: Serve, tmp_path: Path) -> None:
    """Not by what is open, nor by what is on the disk."""
    state_dir = Path(graph.env["PDSERVE_STATE_DIR"])
    found = json.loads((state_dir / "graph.json").read_text())
    mine = str(create(tmp_path / "mine").folder)
    result = graph.pdserve("set", "--etcd", found["etcd"], "--credentials", mine, "router=kv")
    assert (result.returncode, result.stdout) == (1, "")
    assert "no etcd answers" in result.stderr
    assert found["credentials"] == str(state_dir / "credentials")
    result = graph.pdserve("status", "--etcd", found["etcd"], "--credentials", found["credentials"])
    assert "decode-1" in result.stdout

    def others(path: Path) -> int:
        return path.stat().st_mode & 0o077

    assert others(state_dir) == 0
    for folder in ("credentials", "logs", "nats", "etcd", "sockets"):
        assert others(state_dir / folder) == 0
    assert others(state_dir / "graph.json") == 0


def test_a_second_graph_on_the_same_port_is_refused(graph: Serve, tmp_path: Path) -> None:
    result = graph.pdserve("serve", "-f", str(graph.file), PDSERVE_STATE_DIR=str(tmp_path))
    assert result.returncode == 2
    assert f"Port {graph.port} on 127.0.0.1 is held by" in result.stderr


def test_a_real_prometheus_finds_something_for_each_panel(graph: Serve, tmp_path: Path) -> None:
    """Also of what goes wrong: the prefill worker hangs."""
    numbers = count()

    def prefilled() -> str:
        """Where a prompt that no cache has was prefilled."""
        return graph.chat(f"{next(numbers)} and {LONG}")[0].headers["x-pdserve-prefill"]

    def without() -> list[tuple[str, str]]:
        return [(panel, asked) for panel, asked in expressions() if not prometheus.series(asked)]

    with scraping(tmp_path, f"127.0.0.1:{graph.port}") as prometheus:
        until(lambda: prometheus.series("up == 1"), graph)
        (prefill,) = (one for one in _instances(graph) if one["role"] == "prefill")
        os.kill(prefill["pid"], signal.SIGSTOP)
        assert prefilled() == "local"
        os.kill(prefill["pid"], signal.SIGCONT)
        until(lambda: prefilled() == "remote", graph)
        with suppress(AssertionError):
            until(lambda: not without(), graph, 60)
        assert without() == []
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
    lint = promtool("check", "metrics", said=httpx.get(f"{graph.url}/metrics").text).stderr.splitlines()
    assert [line for line in lint if not line.startswith("vllm:")] == []


def test_ctrl_c_on_a_terminal(serve: Serve) -> None:
    with Terminal(serve.command, serve.env) as terminal:
        terminal.until("Ready after")
        assert "starting decode-0, prefill-0 (Ctrl-C stops)" in terminal.text
        terminal.type("\x03")
        terminal.until("the exit code is 0")
    assert serve.processes() == []


def test_closing_the_terminal_leaves_nothing(serve: Serve) -> None:
    with Terminal(serve.command, serve.env) as terminal:
        terminal.until("Ready after")
        terminal.hang_up()
        until(lambda: not serve.processes(), serve)


def _problems(graph: Serve) -> str:
    return str(httpx.get(f"{graph.url}/dashboard/state").json()["problems"])


def _status(graph: Serve) -> str:
    return graph.pdserve("status", "--json").stdout


def _instances(graph: Serve) -> list[dict[str, Any]]:
    state = _status(graph)
    found: list[dict[str, Any]] = json.loads(state)["instances"] if state else []
    return found


def test_a_role_that_is_started_again_has_the_configuration_of_the_first_start(graph: Serve) -> None:
    """Whatever the file says by then."""
    before = graph.file.read_text()
    graph.file.write_text("Graph: {no-such-key: 1}\n")
    try:
        (victim,) = (found for found in _instances(graph) if found["role"] == "prefill")
        ready = graph.text.count("prefill-0 is ready again")
        os.kill(victim["pid"], signal.SIGKILL)
        until(lambda: graph.text.count("prefill-0 is ready again") > ready, graph)
        assert "no-such-key" not in graph.text
    finally:
        graph.file.write_text(before)


def test_ctrl_c_while_it_starts(serve: Serve) -> None:
    """Also while an engine loads in a thread that cannot be stopped. Nothing waits for that, nor for a drain."""
    _simulate(serve, "load-seconds: 90")
    serve.file.write_text(serve.file.read_text().replace("drain-timeout: 5", "drain-timeout: 90"))
    process = serve.start()
    until(lambda: sum(map(_handles_signals, serve.processes())) == 2, serve)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0, serve.text[-5000:]
    assert serve.processes() == []


def test_a_configuration_that_a_role_finds_wrong_ends_the_graph_at_once(serve: Serve) -> None:
    _simulate(serve, "no-such-key: 1")
    assert serve.start().wait(240) == 2
    assert "not started again, for its configuration is wrong" in serve.text
    assert "sim: unknown key no_such_key" in serve.text
    assert "Traceback" not in serve.text
    assert "starts again" not in serve.text
    assert serve.processes() == []


def _simulate(serve: Serve, speeds: str) -> None:
    text = serve.file.read_text()
    serve.file.write_text(
        text.replace("engine: sim", f"engine: sim\n  additional-config: {{sim: {{{speeds}}}}}", 1)
    )


def _handles_signals(process: psutil.Process) -> bool:
    """Whether it is a role that runs: the handler for a dead supervisor is its last."""
    try:
        caught = Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:")[2].split()[0]
        return process.cmdline()[3] in list(Role) and bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)
    except (OSError, IndexError, psutil.Error):
        return False
