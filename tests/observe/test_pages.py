"""The HTTP pages of a process."""

import asyncio
import os
import socket
import threading
from contextlib import ExitStack

import httpx
import psutil
import pytest

from pdserve.contract.messages import Load
from pdserve.contract.records import Instance, Role
from pdserve.contract.reports import MAX_REPORTED_RECEIPTS, ProcessReport
from pdserve.observe import process_pages
from pdserve.observe.process_pages import read_watched, serve_pages
from tests.conditions import until


def instance(name: str, url: str) -> Instance:
    return Instance(name, Role.DECODE, metrics=url)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_process_reports_its_metrics_and_its_load(host: str) -> None:
    with serve_pages(host) as page:
        page.watched = lambda: ProcessReport(Load(running=len(asyncio.all_tasks()), tokens=7))
        async with httpx.AsyncClient() as http:
            assert "pdserve_tasks" in (await http.get(page.metrics)).text
        told = await read_watched([instance("a", page.metrics), instance("b", page.metrics)])
        assert set(told) == {"a", "b"}
        assert told["a"].load.running > 0
        assert told["a"].load.tokens == 7


async def test_processes_that_do_not_respond_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_pages("127.0.0.1") as starting, serve_pages("127.0.0.1") as good:
        starting.watched = Instance("", Role.DECODE).__getattribute__  # type: ignore[assignment]
        urls = {"good": good.metrics, "starting": starting.metrics}
        urls |= {"closed": "http://127.0.0.1:1/metrics", "none": "", "nonsense": "http://[/metrics"}
        assert await read_watched(instance(*item) for item in urls.items()) == {"good": ProcessReport()}
    monkeypatch.setattr(process_pages, "READ_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        silent = f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
        assert await read_watched([instance("silent", silent)]) == {}


async def test_pages_are_503_while_the_event_loop_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pages, "LOOP_TIMEOUT", 0.05)
    with serve_pages("127.0.0.1") as page:
        url = page.metrics.replace("metrics", "watch")
        with _connection(page.metrics, b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n") as client:
            assert b" 503 " in client.recv(100)
        with _connection(page.metrics, b"GET /watch HTTP/1.1\r\nHost: localhost\r\n\r\n") as client:
            assert b" 503 " in client.recv(100)  # `recv` blocks the event loop until the response comes
        assert "load" in (await asyncio.to_thread(httpx.get, url)).json()


async def test_probes_are_answered_at_an_address_that_other_machines_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kubelet may send any host name. (On loopback, foreign names are refused, because of DNS rebinding.)"""
    monkeypatch.setattr(process_pages, "is_loopback", lambda host: False)
    wrong = {"fault": "", "unready": "it drains"}
    with serve_pages("127.0.0.1") as page:
        url = page.metrics.removesuffix("/metrics")
        async with httpx.AsyncClient(base_url=url, headers={"host": "pod-7.example:9100"}) as http:
            starting = await http.get("/ready")
            assert (starting.status_code, starting.json()) == (503, {"status": "it is starting"})
            page.fault, page.unready = lambda: wrong["fault"], lambda: wrong["unready"]
            assert (await http.get("/live")).json() == {"status": "ok"}
            assert (await http.get("/ready")).json() == {"status": "it drains"}
            wrong = {"fault": "it hangs", "unready": ""}
            assert (await http.get("/ready")).status_code == 200
            assert (await http.get("/live")).status_code == 503


async def test_other_host_names_are_refused_and_limits_are_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    with serve_pages("127.0.0.1") as page:
        asked: list[int] = []
        page.receipts = lambda limit, key, request_id: asked.append(limit) or []  # type: ignore[func-returns-value]
        async with httpx.AsyncClient(base_url=page.metrics.removesuffix("/metrics")) as http:
            for limit in ("x", "-1", "9" * 5000, "7"):
                assert (await http.get("/receipts", params={"limit": limit})).json() == []
            for path in ("/watch", "/receipts", "/metrics"):
                for name in ("evil.example", "127.0.0.1.nip.io:80", "[::1", ""):
                    assert (await http.get(path, headers={"host": name})).status_code == 403
                assert (await http.get(path, headers={"host": "localhost:80"})).status_code == 200
    assert asked[:4] == [MAX_REPORTED_RECEIPTS, MAX_REPORTED_RECEIPTS, MAX_REPORTED_RECEIPTS, 7]
    assert capfd.readouterr().err == ""


def _connection(url: str, sent: bytes) -> socket.socket:
    host, _, port = url.removeprefix("http://").removesuffix("/metrics").rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)))
    connection.sendall(sent)
    return connection


async def test_slow_clients_use_few_threads_and_do_not_delay_others() -> None:
    with serve_pages("127.0.0.1") as page, ExitStack() as stack:
        before = threading.active_count()
        for number in range(3 * process_pages.MAX_OPEN):
            sent = b"GET /metrics HTTP/1.1\r\nHost: " if number % 2 else b""
            stack.enter_context(_connection(page.metrics, sent))
        for _ in range(3):
            assert (await asyncio.to_thread(httpx.get, page.metrics)).status_code == 200
        await until(lambda: threading.active_count() <= before + process_pages.MAX_OPEN + 2)


async def test_a_silent_client_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pages, "CLIENT_TIMEOUT", 0.3)
    with serve_pages("127.0.0.1") as page, _connection(page.metrics, b"GET /metrics HTT") as client:
        client.settimeout(3)
        assert await asyncio.to_thread(client.recv, 1) == b""


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
