"""Simulated hosts: isolation, links that are cut, lossy or slow, and cleanup."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pdserve_bench.hosts.network import Host, Network

from tests.network import hosts

_FACTS = """
import json, os, pathlib, socket, time
pathlib.Path("/dev/shm/mine").touch()
pathlib.Path("/tmp/mine").touch()
print(json.dumps({
    "name": socket.gethostname(), "pid": os.getpid(), "seen": os.listdir("/dev/shm"),
    "monotonic": time.monotonic(), "now": time.time(), "folder": os.getcwd(),
}))
"""
_ECHO = """
import select, socket
server, kept = socket.create_server(("", 5000)), []
words = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
words.bind(("", 5000))
print("ready", flush=True)
while True:
    for end in select.select([server, words], [], [])[0]:
        if end is words:
            words.sendto(*words.recvfrom(2000))
        else:
            kept.append(server.accept()[0])
            kept[-1].sendall(b"hello")
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with hosts(tmp_path_factory.mktemp("net")) as found:
        yield found


def _ask(host: Host, words: int, within: float) -> list[float]:
    """Return the delay in seconds of each datagram that came back."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.settimeout(within)
        for _ in range(words):
            began = time.monotonic()
            end.sendto(b"word", (host.address, 5000))
            try:
                end.recv(100)
                found.append(time.monotonic() - began)
            except TimeoutError:
                continue
    return found


def _until_it_answers(host: Host) -> None:
    """Wait until the host answers. After a change, datagrams are lost until the bridge has learnt where the host is."""
    deadline = time.monotonic() + 30
    while not _ask(host, 1, within=0.5):
        assert time.monotonic() < deadline


def _facts(host: Host) -> dict[str, object]:
    log = host.folder / "facts"
    assert host.start([sys.executable, "-c", _FACTS], log).wait(30) == 0
    found: dict[str, object] = json.loads(log.read_text())
    return found


def test_each_host_has_its_own_name_files_and_clocks(net: Network) -> None:
    one, other = _facts(net.host("one")), _facts(net.host("other", clock=-40))
    assert (one["name"], other["name"]) == ("one", "other")
    assert one["seen"] == other["seen"] == ["mine"]
    assert not Path("/tmp/mine").exists()
    assert one["folder"] == other["folder"] == os.getcwd()
    assert float(str(other["monotonic"])) - float(str(one["monotonic"])) > 1_000_000
    assert 35 < float(str(one["now"])) - float(str(other["now"])) < 41


def test_a_link_can_be_cut_lossy_or_slow_and_its_host_can_vanish(net: Network) -> None:
    """Each fault is silent and can be undone; the host returns at another address."""
    echo = net.host("echo")
    log = echo.folder / "log"
    echo.start([sys.executable, "-c", _ECHO], log)
    while log.read_text() != "ready\n":
        time.sleep(0.01)
    with socket.create_connection((echo.address, 5000), timeout=10) as end:
        assert end.recv(5) == b"hello"
        echo.link.cut()
        assert _ask(echo, 1, within=0.2) == []
        end.settimeout(0.1)
        with pytest.raises(TimeoutError):
            end.recv(5)
    echo.link.mend()
    _until_it_answers(echo)
    echo.link.limit(loss=0.5)
    assert 2 <= len(_ask(echo, 60, within=0.05)) <= 40  # half is lost each way
    echo.link.limit(delay=0.1, rate="1gbit")
    _until_it_answers(echo)
    assert min(_ask(echo, 2, within=5)) >= 0.2
    echo.link.limit()
    _until_it_answers(echo)
    assert min(_ask(echo, 20, within=5)) < 0.2
    (echo.folder / "state").touch()
    with socket.create_connection((echo.address, 5000), timeout=10) as end:
        assert end.recv(5) == b"hello"
        again = net.host("echo")
        end.settimeout(0.2)
        with pytest.raises(TimeoutError):
            end.recv(5)
    assert again.address != echo.address
    assert (again.folder / "state").exists()


_LEFT = """
import sys
from pathlib import Path
from pdserve_bench.hosts.network import network
with network(Path(sys.argv[1])) as net:
    host = net.host("one")
    host.start(["sleep", "1000"], host.folder / "log")
    print("ready", flush=True)
    sys.stdin.read()
    raise KeyError
"""


def _below(folder: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if str(folder) in " ".join(process.info["cmdline"] or ())
        or (process.info["environ"] or {}).get("FOLDER") == str(folder)
    ]


USER = ("unshare", "--user", "--map-root-user")


@pytest.mark.parametrize(
    ("before", "ending"), [(USER, None), ((), signal.SIGINT), ((), signal.SIGKILL), (USER, signal.SIGKILL)]
)
def test_hosts_leave_nothing_however_the_process_ends(
    net: Network, tmp_path: Path, before: tuple[str, ...], ending: signal.Signals | None
) -> None:
    """`USER` runs the process without root, in a user namespace."""
    del net  # skips the test if no hosts can be made here
    process = subprocess.Popen(
        [*before, sys.executable, "-c", _LEFT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "FOLDER": str(tmp_path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert len(_below(tmp_path)) >= 4
    if ending:
        process.send_signal(ending)
    process.communicate()
    deadline = time.monotonic() + 10
    while _below(tmp_path):
        assert time.monotonic() < deadline, _below(tmp_path)
