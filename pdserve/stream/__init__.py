"""The stream seam (see `base`). The address chooses the implementation."""

from pdserve.stream.base import StreamClient, StreamServer
from pdserve.stream.memory import MemoryStreamClient, MemoryStreamServer
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer


def listen(host: str) -> StreamServer:
    """A server to enter; it takes a free port on `host`, an address of this machine that frontends can
    reach, or lives in this process where `host` is `memory`."""
    return MemoryStreamServer() if host == "memory" else TcpStreamServer(host)


def connect(address: str, name: str) -> StreamClient:
    """A client to enter, of the server at `address`, which knows it by `name`: of two connections of one name only the
    newer holds. Entering it raises PeerGone when no server answers there."""
    memory = address.startswith("memory://")
    return MemoryStreamClient(address, name) if memory else TcpStreamClient(address, name)
