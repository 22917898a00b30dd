import os
import socket
import subprocess
import sys

import pytest

from pdserve.util import net
from pdserve.util.errors import ConfigError
from pdserve.util.net import find_port_holder, free_port

LOOPBACKS = pytest.mark.parametrize("host", ["127.0.0.1", "::1"])


@LOOPBACKS
def test_free_ports_are_below_the_ephemeral_ports(host: str) -> None:
    """Otherwise an outgoing connection may hold a port before its server has started, or while it is down."""
    assert all(15000 <= free_port(host, 32) <= 30000 for _ in range(20))


def test_no_port_is_given_twice_even_across_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise graphs that start together might choose one port, on which none of them listens yet."""
    first = 10000 + 12 * (os.getpid() % 400)  # ports that no other test uses
    last = first + 11
    code = (
        "import sys; from pdserve.util import net; net._FIRST, net._LAST = map(int, sys.argv[1:]);"
        "print(*(net.free_port('127.0.0.1') for _ in range(5)), flush=True); input()"
    )
    monkeypatch.setattr(net, "_FIRST", first)
    monkeypatch.setattr(net, "_LAST", last)
    command = [sys.executable, "-c", code, str(first), str(last)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = set(map(int, other.stdout.readline().split()))
        ours = {free_port("127.0.0.1") for _ in range(3)}
        other.communicate("\n")
    assert len(theirs) == 5
    assert len(ours) == 3
    assert not ours & theirs


@LOOPBACKS
def test_the_holder_of_a_port_is_found(host: str) -> None:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        port = server.getsockname()[1]
        assert "pid" in (find_port_holder(host, port) or "")
    assert find_port_holder(host, port) is None
    assert find_port_holder("::", free_port("::")) is None


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^cannot listen on 192\.0\.2\.1:8000: no address of this machine"):
        find_port_holder("192.0.2.1", 8000)
