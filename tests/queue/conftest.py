"""Fixtures of both queue implementations, with a short `ack_wait`."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from pdserve.queue.base import PrefillQueue
from pdserve.queue.jetstream.queue import JetStreamQueue
from pdserve.queue.jetstream.stream import StreamLimits
from pdserve.security.credentials import Credentials
from tests.memory.queue import MemoryBroker, MemoryQueue
from tests.servers import kill, nats_server, restart

ACK_WAIT, BOUND, MAX_DELIVER = 1.0, 50, 3


class Queues:
    """Makes and enters queues; each stands for a process."""

    def __init__(self, make: Callable[[str], PrefillQueue]) -> None:
        self._make = make
        self._stack = AsyncExitStack()

    async def __call__(self, model: str = "org/model 1.5", loaded: str = "") -> PrefillQueue:
        queue = self._make(model)
        if loaded:
            queue.bind(loaded)
        return await self._stack.enter_async_context(queue)

    async def __aenter__(self) -> "Queues":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


class Outage:
    """Queues whose server can be stopped."""

    queues: Queues

    async def down(self) -> None: ...

    async def up(self, *, lose_data: bool) -> None: ...


def _memory_queues(broker: MemoryBroker) -> Queues:
    return Queues(lambda model: MemoryQueue(broker, "ns", model))


def nats_queues(
    url: str, namespace: str, credentials: Credentials | None = None, ack_wait: float = ACK_WAIT
) -> Queues:
    limits = StreamLimits(ack_wait=ack_wait, bound=BOUND, max_deliver=MAX_DELIVER, resync=0.3, check=0.3)
    return Queues(lambda model: JetStreamQueue(url, namespace, model, limits, credentials))


def _broker() -> MemoryBroker:
    return MemoryBroker(ACK_WAIT, MAX_DELIVER, BOUND)


@pytest.fixture(params=["memory", "nats"])
def url(request: pytest.FixtureRequest) -> str | None:
    """None for the in-memory queue, so that no server starts."""
    found: str | None = request.getfixturevalue("nats_url") if request.param == "nats" else None
    return found


@pytest.fixture
async def queues(url: str | None, namespace: str) -> AsyncIterator[Queues]:
    async with nats_queues(url, namespace) if url else _memory_queues(_broker()) as made:
        yield made


class _MemoryOutage(Outage):
    def __init__(self) -> None:
        self._broker = _broker()
        self.queues = _memory_queues(self._broker)

    async def down(self) -> None:
        await self._broker.down()

    async def up(self, *, lose_data: bool) -> None:
        await self._broker.up(lose_data)


class NatsOutage(Outage):
    """A NATS of one test. It uses TLS, as in most graphs; the NATS that all tests share does not."""

    def __init__(self, state_dir: Path, credentials: Credentials) -> None:
        self.server = nats_server(state_dir, credentials=credentials)
        self.tls = credentials.client_context()

    async def down(self) -> None:
        await kill(self.server)

    async def up(self, *, lose_data: bool) -> None:
        if lose_data:
            self.server.data_dir.rename(self.server.data_dir.with_name("lost"))
        await restart(self.server)


@pytest.fixture
async def memory_outage() -> AsyncIterator[Outage]:
    memory = _MemoryOutage()
    async with memory.queues:
        yield memory


@pytest.fixture
async def nats_outage(tmp_path: Path, credentials: Credentials) -> AsyncIterator[NatsOutage]:
    real = NatsOutage(tmp_path, credentials)
    async with real.server:
        real.queues = nats_queues(real.server.url, "ns", credentials)
        async with real.queues:
            yield real


@pytest.fixture(params=["memory_outage", "nats_outage"])
def outage(request: pytest.FixtureRequest) -> Outage:
    found: Outage = request.getfixturevalue(request.param)
    return found
