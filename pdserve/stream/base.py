"""The stream seam: one long-lived two-way message stream between each frontend and each decode worker.

Messages on one connection arrive in the order sent, and at most once. A lost connection is told to both
sides; what was on its way then is lost, and whoever needs it sends it again with a new request id.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from pdserve.messages import ToDecode, ToFrontend


class StreamServer(ABC):
    """The decode worker's end. Undecodable messages are logged and skipped."""

    address: str
    """what frontends connect to; set on entering"""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def received(self) -> AsyncIterator[tuple[str, ToDecode | None]]:
        """`(frontend id, message)` in order of arrival; no message (None): this frontend is gone."""

    @abstractmethod
    async def send(self, frontend: str, message: ToFrontend) -> None:
        """Raises PeerGone where the frontend is not connected. Never waits for a slow reader for longer than
        a second: it counts as gone then."""


class StreamClient(ABC):
    """A frontend's end of one connection to one decode worker; entering it connects."""

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Raises PeerGone when nobody answers within a few seconds."""

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    async def send(self, message: ToDecode) -> None:
        """Raises PeerGone, and ProtocolError for a message that cannot be encoded: nothing was sent then, and the
        connection holds."""

    @abstractmethod
    def received(self) -> AsyncIterator[ToFrontend]:
        """In order of arrival; raises PeerGone when the worker is gone: its process ended, or nothing,
        heartbeats included, came from it for `silence` seconds (a few), as when it hangs or its network is
        cut, or it sent something that cannot be decoded, since tokens would be missing."""
