"""The stream seam (see `base`). The address chooses the implementation."""

from pdserve.credentials import Credentials
from pdserve.stream.base import StreamClient, StreamServer
from pdserve.stream.memory import MemoryStreamClient, MemoryStreamServer
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer


def listen(host: str, credentials: Credentials | None = None) -> StreamServer:
    """A server to enter; it takes a free port on `host`, an address of this machine that frontends can
    reach, or lives in this process where `host` is `memory`. With credentials it takes frontends of the same graph
    only, by TLS."""
    return MemoryStreamServer() if host == "memory" else TcpStreamServer(host, credentials)


def connect(address: str, name: str, credentials: Credentials | None = None) -> StreamClient:
    """A client to enter, of the server at `address`, which knows it by `name`: of two connections of one name only the
    newer holds. Entering it raises PeerGone when no server of the same graph answers there: with credentials a server
    without TLS is none, and the other way round."""
    memory = address.startswith("memory://")
    return MemoryStreamClient(address, name) if memory else TcpStreamClient(address, name, credentials)
