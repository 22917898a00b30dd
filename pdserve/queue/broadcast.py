"""The seam for occasional messages from a process to all others of its kind."""

from abc import abstractmethod
from collections.abc import AsyncIterator

from pdserve.tasks import Lifetime


class Broadcast(Lifetime):
    """One process's side. A message reaches, at most once, every process that has entered, the sender included. It
    reconnects by itself: entering does not fail while the server is away, and the iterator goes on when it is back."""

    @property
    @abstractmethod
    def connected(self) -> bool: ...

    @abstractmethod
    async def send(self, message: bytes) -> None:
        """Raises QueueUnavailable while the server is away."""

    @abstractmethod
    def messages(self) -> AsyncIterator[bytes]:
        """Yield what has come since entering. There may be one reader."""
