import socket
import subprocess
import sys

import pytest

from pdserve.errors import ConfigError
from pdserve.frontend.sockets import bind

_HOLD = (
    "import socket, os\n"
    "if os.fork(): os._exit(0)\n"  # orphaned: not a child of our own parent
    "s = socket.socket()\n"
    "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
    "s.bind(('127.0.0.1', 0)); s.listen()\n"
    "print(s.getsockname()[1], os.getpid(), flush=True)\n"
    "input()\n"
)


def test_processes_share_a_port() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            assert second.getsockname()[1] == port


def test_another_process_on_the_port_is_named() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    port, pid = map(int, holder.stdout.readline().split())
    try:
        with pytest.raises(ConfigError, match=rf"{port} is in use by process {pid} .*python"):
            bind("127.0.0.1", port)
    finally:
        holder.stdin.close()
        holder.stdout.close()
        holder.wait()


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        bind("203.0.113.1", 0)


def test_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    with bind("::1", 0) as sock:
        assert sock.family == socket.AF_INET6


def test_a_bound_port_gets_no_connections_yet() -> None:
    with bind("127.0.0.1", 0) as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname())
