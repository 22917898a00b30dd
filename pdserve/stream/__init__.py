"""The stream seam (see `base`). The address chooses the implementation."""

from importlib import import_module
from types import ModuleType

from pdserve.stream.base import StreamClient, StreamServer

_IMPLEMENTATIONS = {"zmq": "pdserve.stream.zmq", "memory": "pdserve.stream.memory"}


def listen(host: str) -> StreamServer:
    """A server to enter; it takes a free port on `host`, an address of this machine that frontends can
    reach, or lives in this process where `host` is `memory`."""
    server: StreamServer = _implementation(host == "memory").listen(host)
    return server


def connect(address: str, frontend: str) -> StreamClient:
    """A client to enter, for `frontend` (its instance id), of the server at `address`. Entering it raises
    PeerGone when nobody answers there."""
    client: StreamClient = _implementation(address.startswith("memory://")).connect(address, frontend)
    return client


def _implementation(memory: bool) -> ModuleType:
    return import_module(_IMPLEMENTATIONS["memory" if memory else "zmq"])
