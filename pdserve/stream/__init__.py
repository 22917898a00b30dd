"""The stream seam (see `base`). It is on TCP."""

from pdserve.credentials import Credentials
from pdserve.stream.base import StreamClient, StreamServer
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer


def listen(host: str, credentials: Credentials | None = None) -> StreamServer:
    """Return a server to enter. It listens on a free port of `host`, an address of this machine that frontends can
    reach. With credentials it accepts only frontends of the same graph, over TLS."""
    return TcpStreamServer(host, credentials)


def connect(address: str, name: str, credentials: Credentials | None = None) -> StreamClient:
    """Return a client to enter, of the server at `address`. `name` identifies it there: a new connection replaces an
    earlier one of the same name. Entering raises PeerGone if no server of the same graph answers; both sides must have
    credentials, or neither."""
    return TcpStreamClient(address, name, credentials)
