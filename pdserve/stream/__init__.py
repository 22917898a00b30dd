"""The stream seam (see `base`). The address chooses the implementation."""

from pdserve.credentials import Credentials
from pdserve.stream.base import StreamClient, StreamServer
from pdserve.stream.memory import MemoryStreamClient, MemoryStreamServer
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer


def listen(host: str, credentials: Credentials | None = None) -> StreamServer:
    """Return a server to enter. It listens on a free port of `host`, an address of this machine that frontends can
    reach, or in this process if `host` is `memory`. With credentials it accepts only frontends of the same graph, over
    TLS."""
    return MemoryStreamServer() if host == "memory" else TcpStreamServer(host, credentials)


def connect(address: str, name: str, credentials: Credentials | None = None) -> StreamClient:
    """Return a client to enter, of the server at `address`. `name` identifies it there: a new connection replaces an
    earlier one of the same name. Entering raises PeerGone if no server of the same graph answers; both sides must have
    credentials, or neither."""
    memory = address.startswith("memory://")
    return MemoryStreamClient(address, name) if memory else TcpStreamClient(address, name, credentials)
