"""The seam for stored responses: responses that one frontend has made, kept for all of them, and questions to the
frontend that is still working on a response.

A stored response has an owner (an API key), and no other owner finds it. Each owner's responses are bounded in age and
bytes: the oldest go first, and no owner displaces another's.
"""

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from pdserve.tasks import Lifetime

Answer = Callable[[bytes], AsyncIterator[bytes]]
"""from a question to the parts of its answer, none of which is empty"""


@dataclass(frozen=True)
class StoreLimits:
    age: float = 3600.0
    """seconds"""
    max_bytes: int = 64 << 20
    """for each owner"""


class ResponseStore(Lifetime):
    """One frontend's side of the store. Methods raise QueueUnavailable while the server is away, and never wait long
    for it; entering does not fail then."""

    @property
    @abstractmethod
    def connected(self) -> bool: ...

    @abstractmethod
    async def put(self, owner: str, key: str, data: bytes) -> None:
        """Store `data` in place of what was there. Returns when every frontend can read it."""

    @abstractmethod
    async def get(self, owner: str, key: str) -> bytes:
        """Raises KeyError if the owner has no such response, or no longer."""

    @abstractmethod
    async def listen(self, frontend: str, answer: Answer) -> None:
        """Answer the questions to this frontend with `answer` from now on, several at a time."""

    @abstractmethod
    def ask(self, frontend: str, question: bytes) -> AsyncIterator[bytes]:
        """Yield the parts of the frontend's answer as they come. Raises PeerGone if no such frontend listens, or if it
        is silent for some seconds. Close the iterator if it is not read to its end."""
