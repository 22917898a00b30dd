"""What processes tell over HTTP beside their work."""

import asyncio
import os
import socket
import threading
import time
from contextlib import ExitStack

import httpx
import psutil
import pytest

from pdserve.messages import Load
from pdserve.observe import pages
from pdserve.observe.pages import read_loads, serve_pages
from pdserve.records import Instance, Role
from tests.conditions import until


def instance(name: str, url: str) -> Instance:
    return Instance(name, Role.DECODE, metrics=url)


async def test_a_process_tells_its_metrics_and_its_load() -> None:
    with serve_pages("127.0.0.1") as page:
        page.load = lambda: Load(running=len(asyncio.all_tasks()), unreachable=["a"])
        async with httpx.AsyncClient() as http:
            assert "pdserve_tasks" in (await http.get(page.metrics)).text
        loads = await read_loads([instance("a", page.metrics), instance("b", page.metrics)])
        assert set(loads) == {"a", "b"}
        assert loads["a"].running > 0
        assert loads["a"].unreachable == ["a"]


async def test_what_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "READ_WITHIN", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        silent = f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
        with serve_pages("127.0.0.1") as starting, serve_pages("127.0.0.1") as good:
            starting.load = Instance("", Role.DECODE).__getattribute__  # type: ignore[assignment]
            urls = {"good": good.metrics, "starting": starting.metrics, "silent": silent}
            urls |= {"gone": "http://127.0.0.1:1/metrics", "none": "", "nonsense": "http://[/metrics"}
            assert await read_loads(instance(*item) for item in urls.items()) == {"good": Load()}


async def test_a_process_that_hangs_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TOLD_WITHIN", 0.05)
    with serve_pages("127.0.0.1") as page:
        load = page.metrics.replace("metrics", "load")
        asking = asyncio.get_running_loop().run_in_executor(None, httpx.get, load)
        await asyncio.sleep(0)
        time.sleep(0.4)  # noqa: ASYNC251 - it hangs
        assert (await asking).status_code == 503
        assert (await asyncio.to_thread(httpx.get, load)).json() == {
            "running": 0, "waiting": 0, "kv_usage": 0.0, "tokens": 0, "queue_depth": 0, "unreachable": [],
        }  # fmt: skip


def _connection(url: str, sent: bytes) -> socket.socket:
    host, _, port = url.removeprefix("http://").removesuffix("/metrics").rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)))
    connection.sendall(sent)
    return connection


async def test_slow_clients_cost_a_process_few_threads_and_others_nothing() -> None:
    with serve_pages("127.0.0.1") as page, ExitStack() as stack:
        before = threading.active_count()
        for number in range(3 * pages.MAX_OPEN):
            sent = b"GET /metrics HTTP/1.1\r\nHost: " if number % 2 else b""
            stack.enter_context(_connection(page.metrics, sent))
        for _ in range(3):
            assert (await asyncio.to_thread(httpx.get, page.metrics)).status_code == 200
        await until(lambda: threading.active_count() <= before + pages.MAX_OPEN + 2)


async def test_a_silent_client_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SILENT_FOR", 0.3)
    with serve_pages("127.0.0.1") as page, _connection(page.metrics, b"GET /metrics HTT") as client:
        client.settimeout(3)
        assert await asyncio.to_thread(client.recv, 1) == b""


async def test_pages_on_an_ipv6_address() -> None:
    with serve_pages("::1") as page:
        assert (await asyncio.to_thread(httpx.get, page.metrics)).status_code == 200
        assert set(await read_loads([instance("a", page.metrics)])) == {"a"}


async def test_a_forked_process_does_not_listen_for_its_parent() -> None:
    with serve_pages("127.0.0.1") as page:
        port = httpx.URL(page.metrics).port
        child = os.fork()
        if not child:
            held = [c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
            os._exit(port in held)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert status == 0
        async with httpx.AsyncClient() as http:
            assert (await http.get(page.metrics)).status_code == 200
