"""The stream seam: one long-lived two-way message stream between each frontend and each decode worker.

Messages on one connection arrive in the order sent, and at most once. Both sides learn of a lost connection; what was
on its way then is lost, and a frontend that needs it sends it again with a new request id.
"""

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable

from pdserve.messages import ToDecode, ToFrontend
from pdserve.tasks import Lifetime


class StreamServer(Lifetime):
    """The decode worker's end. Undecodable messages are logged and skipped."""

    address: str
    """what frontends connect to; set on entering"""

    @abstractmethod
    def received(self) -> AsyncIterator[tuple[str, ToDecode | None]]:
        """`(frontend id, message)` in order of arrival; no message (None): this frontend is gone."""

    @abstractmethod
    async def send(self, frontend: str, message: ToFrontend) -> None:
        """Raises PeerGone where the frontend is not connected. Never waits for a slow reader for longer than
        a second: it counts as gone then."""


class StreamClient(Lifetime):
    """A frontend's end of one connection to one decode worker. Entering it connects, and raises PeerGone when no worker
    answers within a few seconds."""

    @abstractmethod
    async def send(self, message: ToDecode) -> None:
        """Raises PeerGone when `received` ends, too, and ProtocolError for a message that cannot be encoded: nothing
        was sent then, and the connection holds."""

    @abstractmethod
    def received(self) -> AsyncIterator[ToFrontend]:
        """In order of arrival; raises PeerGone when the worker is gone: its process ended, or nothing,
        heartbeats included, came from it for `silence` seconds (a few), as when it hangs or its network is
        cut, or it sent something that cannot be decoded, since tokens would be missing."""

    @property
    @abstractmethod
    def round_trip(self) -> float | None:
        """Seconds that a message and its answer took last, measured about every second; longer than that where an
        answer is overdue. None: not measured yet."""

    async def deliver(self, take: Callable[[ToFrontend], None]) -> None:
        """As `received`, in place of it, for a `take` that neither waits nor raises: it may be called in the very turn
        of the event loop in which the message came."""
        async for message in self.received():
            take(message)
