"""The seam for what the processes of a graph tell all others of their kind, now and then."""

from abc import abstractmethod
from collections.abc import AsyncIterator

from pdserve.tasks import Lifetime


class Broadcast(Lifetime):
    """One process's side. What is sent reaches, at most once, all that are entered, the sender too. It reconnects by
    itself: entering does not fail when the server is away, and the iterator goes on when it is back."""

    @abstractmethod
    async def send(self, message: bytes) -> None:
        """Raises QueueUnavailable while the server is away."""

    @abstractmethod
    def messages(self) -> AsyncIterator[bytes]:
        """What has come since it was entered and was not read yet. For one reader."""
