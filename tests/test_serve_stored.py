"""Stored responses as a user has them: two frontend processes on one port, NATS with TLS, simulated engines."""

import json
import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

from pdserve.ports import free_port
from tests.serving import FRONTEND, WORKERS, Serve, kv_ports, running, until

SLOW = "  additional-config: {sim: {step-seconds: 0.05}}\n"
ASK = {"model": "demo", "input": "hello", "max_output_tokens": 4}


def test_any_frontend_knows_what_another_made(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    workers = WORKERS.format(kv_port=kv_ports(), workers=1).replace(
        "engine: sim\n  remote", f"engine: sim\n{SLOW}  remote"
    )
    frontends = FRONTEND.format(port=port).replace("port:", "ServiceArgs: {workers: 2}, port:")
    serve = Serve(tmp_path, workers + frontends, port=port)
    with running(serve, 240), ExitStack() as stack:
        clients: dict[str, httpx.Client] = {}

        def both() -> bool:
            client = stack.enter_context(httpx.Client(base_url=serve.url, timeout=30))
            clients.setdefault(client.get("/health").json()["frontend"], client)
            return len(clients) == 2

        until(both, serve, 240)
        (maker, one), (_, other) = clients.items()
        first = create(one)
        assert retrieve(other, first["id"]) == first
        second = create(other, previous_response_id=first["id"])
        assert retrieve(one, second["id"]) == second
        lasting = create(one, max_output_tokens=2000, background=True)["id"]
        assert other.post(f"/v1/responses/{lasting}/cancel").json()["status"] == "cancelled"
        lost = create(one, max_output_tokens=2000, background=True)["id"]
        assert status_of(other, lost) in ("queued", "in_progress")
        os.kill(pid_of(maker, serve), signal.SIGKILL)
        until(lambda: status_of(other, lost) == "failed", serve)
        assert retrieve(other, first["id"]) == first


def create(client: httpx.Client, **more: object) -> Any:
    return client.post("/v1/responses", json={**ASK, **more}).raise_for_status().json()


def retrieve(client: httpx.Client, response_id: str) -> Any:
    return client.get(f"/v1/responses/{response_id}").raise_for_status().json()


def status_of(client: httpx.Client, response_id: str) -> str:
    """Empty where the connection was made to a frontend that dies just then."""
    with suppress(httpx.TransportError):
        return str(retrieve(client, response_id)["status"])
    return ""


def pid_of(instance: str, serve: Serve) -> int:
    status = json.loads(serve.pdserve("status", "--json").stdout)
    return next(int(each["pid"]) for each in status["instances"] if each["id"] == instance)
