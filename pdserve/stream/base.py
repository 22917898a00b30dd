"""The stream seam: one long-lived two-way message stream between each frontend and each decode worker.

Messages on one connection arrive in the order sent, and at most once. Both sides learn of a lost connection;
messages in flight are lost then, and the frontend submits the requests again under new ids.
"""

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable

from pdserve.messages import ToDecode, ToFrontend
from pdserve.tasks import Lifetime


class StreamServer(Lifetime):
    """The decode worker's end. Undecodable messages are logged and skipped."""

    address: str
    """the address that frontends connect to; set on entering"""

    @abstractmethod
    def received(self) -> AsyncIterator[tuple[str, ToDecode | None]]:
        """Yield `(frontend id, message)` in order of arrival; a message of None means that the frontend is gone."""

    @abstractmethod
    async def send(self, frontend: str, message: ToFrontend) -> None:
        """Raises PeerGone if the frontend is not connected, and ProtocolError if the message is too large: nothing was
        sent then. Waits at most a second for a slow reader, which then counts as gone."""


class StreamClient(Lifetime):
    """A frontend's end of one connection to one decode worker. Entering it connects, and raises PeerGone if no worker
    answers within a few seconds."""

    @abstractmethod
    async def send(self, message: ToDecode) -> None:
        """Raises PeerGone if the connection is lost (`received` then ends, too), and ProtocolError if the message
        cannot be encoded or is too large: nothing was sent then, and the connection holds."""

    @abstractmethod
    def received(self) -> AsyncIterator[ToFrontend]:
        """Yield messages in order of arrival; raise PeerGone when the worker is gone. It is gone when its process has
        ended, when it has sent nothing for a few seconds, not even heartbeats (it hangs, or the network is cut), and
        when it has sent a message that cannot be decoded, since tokens would be missing."""

    @property
    @abstractmethod
    def round_trip(self) -> float | None:
        """Seconds from the last heartbeat to its answer, about one a second; growing while an answer is overdue. None:
        not measured yet."""

    async def deliver(self, take: Callable[[ToFrontend], None]) -> None:
        """Like `received`, but pass each message to `take` as soon as it comes. `take` must neither block nor raise."""
        async for message in self.received():
            take(message)
