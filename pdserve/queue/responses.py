"""The seam for stored responses: what one frontend has answered, kept for all of them, and questions from a frontend to
the one that is still working on an answer.

What is kept has an owner (an API key), and is found by no other. It is bounded for each owner, by age and bytes: the
oldest go first, and one owner pushes out nothing of another.
"""

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from pdserve.tasks import Lifetime

Answer = Callable[[bytes], AsyncIterator[bytes]]
"""from a question to the parts of its answer, none of them empty"""


@dataclass(frozen=True)
class StoreLimits:
    age: float = 3600.0
    """seconds"""
    max_bytes: int = 64 << 20
    """of each owner"""


class ResponseStore(Lifetime):
    """One frontend's side of it. Methods raise QueueUnavailable while the server is away, and never wait long for it;
    entering does not fail then."""

    @abstractmethod
    async def put(self, owner: str, key: str, data: bytes) -> None:
        """Returns when it can be read by every frontend. In place of what was there."""

    @abstractmethod
    async def get(self, owner: str, key: str) -> bytes:
        """Raises KeyError where the owner has none, or no longer."""

    @abstractmethod
    async def listen(self, frontend: str, answer: Answer) -> None:
        """From now on `answer` answers what is asked of this frontend, several questions at a time."""

    @abstractmethod
    def ask(self, frontend: str, question: bytes) -> AsyncIterator[bytes]:
        """The parts of its answer, as they come. Raises PeerGone where no such frontend listens, or it is silent for
        seconds. To be closed where it is not read to its end."""
