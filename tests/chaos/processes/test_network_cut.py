"""Network cuts on real sockets: old and new connections pass no data either way until the cut ends."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from pdserve_bench.chaos.processes.network_cut import Cannot, cut_off

from tests.conditions import until

_ECHO = """
import socket, sys, threading
def echo(end):
    while data := end.recv(100):
        end.sendall(data)
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
"""


@pytest.fixture
def echo() -> Iterator[tuple[int, int]]:
    """Pid and port of an echo process."""
    process = subprocess.Popen([sys.executable, "-c", _ECHO], stdout=subprocess.PIPE, process_group=0)
    assert process.stdout is not None
    yield process.pid, int(process.stdout.readline())
    process.kill()
    process.communicate()


def _says(end: socket.socket, within: float = 0.3) -> bytes:
    end.settimeout(within)
    try:
        return end.recv(100)
    except TimeoutError:
        return b""


async def test_a_cut_connection_passes_nothing_until_healed(echo: tuple[int, int]) -> None:
    pid, port = echo
    with socket.create_connection(("127.0.0.1", port)) as old:
        old.sendall(b"before")
        assert _says(old, 5) == b"before"
        try:
            async with cut_off(pid, []):
                old.sendall(b"during")
                assert _says(old) == b""
                with socket.socket() as new:
                    new.settimeout(0.3)
                    with pytest.raises(TimeoutError):
                        new.connect(("127.0.0.1", port))
        except Cannot as reason:
            pytest.skip(str(reason))
        assert _says(old, 5) == b"during"  # TCP sends it again
        with socket.create_connection(("127.0.0.1", port), timeout=5) as new:
            new.sendall(b"after")
            assert _says(new, 5) == b"after"


_CALLS_OUT = """
import socket, sys
sys.stdin.readline()
end = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sys.stdin.readline()
end.sendall(b"hello")
sys.stdin.readline()
"""


async def test_new_connections_are_cut_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        command = [sys.executable, "-c", _CALLS_OUT, str(server.getsockname()[1])]
        caller = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0, bufsize=0)  # noqa: ASYNC220
        assert caller.stdin is not None
        try:
            async with cut_off(caller.pid, []) as cut:
                caller.stdin.write(b"\n")
                end, _ = server.accept()
                await until(lambda: cut.connections >= 2)  # both ends
                caller.stdin.write(b"\n")
                assert _says(end) == b""
            assert _says(end, 5) == b"hello"
            end.close()
        except Cannot as reason:
            pytest.skip(str(reason))
        finally:
            caller.communicate()


_TWO_WAYS = """
import socket, sys
ends = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
for line in sys.stdin:
    for end in ends:
        end.sendall(line.encode())
"""


@pytest.fixture
def two_ways() -> Iterator[tuple["subprocess.Popen[bytes]", list[socket.socket]]]:
    """A process that forwards its input to two ports, and their listening sockets."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(server.getsockname()[1]) for server in (first, other)]
        command = [sys.executable, "-c", _TWO_WAYS, *ports]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
        yield process, [first, other]
        process.kill()
        process.communicate()


async def test_only_connections_to_one_port_are_cut(
    two_ways: tuple["subprocess.Popen[bytes]", list[socket.socket]],
) -> None:
    process, (first, other) = two_ways
    port, pipe = first.getsockname()[1], process.stdin
    assert pipe is not None
    with first.accept()[0] as cut, other.accept()[0] as whole:
        try:
            async with cut_off(process.pid, [], port):
                pipe.write(b"during\n")
                pipe.flush()
                assert _says(whole, 5) == b"during\n"
                assert _says(cut) == b""
                with socket.socket() as new:
                    new.settimeout(0.3)
                    with pytest.raises(TimeoutError):
                        new.connect(("127.0.0.1", port))
        except Cannot as reason:
            pytest.skip(str(reason))
        assert _says(cut, 5) == b"during\n"
