"""Which of a vLLM engine's own request ids stands for which request."""

from collections import OrderedDict
from dataclasses import dataclass

from pdserve.errors import ProtocolError

_REMEMBERED = 100_000


@dataclass(eq=False)
class Ticket:
    request_id: str
    """as the worker knows it"""
    prompt: list[int]
    body: list[bytes]
    prefill: bool = False
    pulls: bool = False
    """its prompt's KV comes from another engine"""
    engine_id: str = ""
    """as the engine knows it now: a restarted request gets a new one"""
    restarts: int = 0
    began: bool = False
    """it has a token"""


class Tickets:
    """Every running request has one."""

    def __init__(self) -> None:
        self._by_engine: dict[str, Ticket] = {}
        self._by_request: dict[str, Ticket] = {}
        self._used: OrderedDict[str, None] = OrderedDict()

    def add(self, ticket: Ticket) -> None:
        """Raises ProtocolError for an id used before: vLLM dies of one that it still has. The memory for
        finished ones is long but not endless."""
        if ticket.request_id in self._used:
            raise ProtocolError(f"request {ticket.request_id} was given to this engine before")
        self._used[ticket.request_id] = None
        if len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)
        ticket.engine_id = ticket.request_id
        self._by_engine[ticket.engine_id] = self._by_request[ticket.request_id] = ticket

    def restart(self, ticket: Ticket) -> None:
        """Give it a new id inside the engine; the old one stands for nothing any more."""
        del self._by_engine[ticket.engine_id]
        ticket.restarts += 1
        ticket.engine_id = f"{ticket.request_id}#{ticket.restarts}"
        self._by_engine[ticket.engine_id] = ticket

    def drop(self, ticket: Ticket) -> None:
        del self._by_engine[ticket.engine_id]
        del self._by_request[ticket.request_id]

    def of_engine(self, engine_id: str) -> Ticket | None:
        return self._by_engine.get(engine_id)

    def of_request(self, request_id: str) -> Ticket | None:
        return self._by_request.get(request_id)

    def __len__(self) -> int:
        return len(self._by_engine)
