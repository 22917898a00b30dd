"""Workers on simulated engines, with queue and registry in memory."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from prometheus_client import REGISTRY

from pdserve.both.worker import BothWorker
from pdserve.config.schema import Config, DecodeConfig, PrefillConfig
from pdserve.contract.messages import (
    Cancel,
    Failed,
    KvHandle,
    Load,
    Outputs,
    Placed,
    PrefillAnswer,
    PrefillStarted,
    Promise,
    Refused,
    Submit,
    ToFrontend,
    WorkerLoad,
)
from pdserve.contract.records import WIRE, Instance, Role, encode_record
from pdserve.decode.requests import DecodeRequest
from pdserve.decode.worker import DecodeWorker
from pdserve.engine.sim.engine import SimEngine
from pdserve.engine.sim.wire import CoreOutputs
from pdserve.plan.slots import Slot
from pdserve.prefill.worker import PrefillWorker
from pdserve.process.worker import EngineWorker
from pdserve.queue.base import Delivery
from pdserve.runtime.tasks import Lifetime
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer
from tests.conditions import until
from tests.engine.sims import LOADED, body, decode_outputs, expected, spec
from tests.memory.queue import MemoryBroker, MemoryQueue
from tests.memory.registry import MemoryRegistry, MemoryServer

W = TypeVar("W", bound=EngineWorker)
SHORT = list(range(3, 23))
LONG = list(range(103, 603))
MAX_MODEL_LEN = 8192
_numbers = count()


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, {"model": "demo", **labels}) or 0.0


@contextmanager
def failing(reason: str, times: int = 1) -> Iterator[None]:
    """Assert that `times` remote prefills fail for this reason in the block."""
    name = "pdserve_remote_prefill_failures_total"
    before = counted(name, reason=reason)
    yield
    assert counted(name, reason=reason) == before + times


@dataclass
class Answered:
    """A frontend's messages for one request."""

    prompt: list[int]
    max_tokens: int
    placed: Placed | None = None
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    failed: Failed | None = None

    @property
    def over(self) -> bool:
        return self.finished or self.failed is not None

    @property
    def way(self) -> tuple[str, str]:
        """Where the prompt was prefilled (`local` or `remote`), and why."""
        assert self.placed is not None
        return self.placed.prefill, self.placed.reason

    def check(self) -> None:
        """Assert that the tokens are right, and complete unless the request failed."""
        assert self.tokens == expected(self.prompt, len(self.tokens))
        assert self.failed or len(self.tokens) == min(self.max_tokens, MAX_MODEL_LEN - len(self.prompt))


class FrontendStream(Lifetime):
    """A frontend's end of a decode worker's stream."""

    def __init__(self, address: str, name: str = "frontend-0") -> None:
        self.client = TcpStreamClient(address, name)
        self.answered: dict[str, Answered] = {}
        self.refused: list[Refused] = []
        self.loads: list[Load] = []
        self.messages: list[ToFrontend] = []

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        async with self.client:
            self.reader = asyncio.create_task(self._read())
            try:
                yield
            finally:
                self.reader.cancel()
                await asyncio.gather(self.reader, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self.client.received():
            self.messages.append(message)
            match message:
                case Placed(request_id):
                    self.answered[request_id].placed = message
                case Failed(request_id):
                    self.answered[request_id].failed = message
                case Refused():
                    self.refused.append(message)
                case WorkerLoad(load):
                    self.loads.append(load)
                case Outputs(frames):
                    self._outputs(decode_outputs(frames[:1]))  # the other frames are tensors

    def _outputs(self, step: CoreOutputs) -> None:
        for output in step.outputs:
            answered = self.answered[output.request_id]
            assert answered.placed is not None, "outputs before Placed"
            assert not answered.over, "outputs after the end"
            answered.tokens += output.new_token_ids
            answered.finished = output.finish_reason is not None

    async def submit(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        seconds: float = 30.0,
        request_id: str = "",
        client: str = "",
        promise: Promise | UnsetType = UNSET,
        **sampling: object,
    ) -> str:
        request_id = request_id or f"r{next(_numbers)}"
        self.answered.setdefault(request_id, Answered(prompt, max_tokens))
        asked = Submit(request_id, prompt, seconds, body(max_tokens, **sampling))
        await self.client.send(replace(asked, client=client, promise=promise))
        return request_id

    async def stream(self, prompt: list[int] = SHORT, max_tokens: int = 5000) -> str:
        """Start a request; return its id after its first token."""
        request_id = await self.submit(prompt, max_tokens)
        await until(lambda: bool(self.answered[request_id].tokens))
        return request_id

    async def ask(self, prompt: list[int], max_tokens: int = 4, **sampling: object) -> Answered:
        return await self.end_of(await self.submit(prompt, max_tokens, 30.0, "", "", UNSET, **sampling))

    async def end_of(self, request_id: str) -> Answered:
        answered = self.answered[request_id]
        await until(lambda: answered.over, within=10)
        answered.check()
        return answered

    async def failure(self, request_id: str) -> Failed:
        failed = (await self.end_of(request_id)).failed
        assert failed is not None
        return failed

    async def cancel(self, request_id: str) -> None:
        await self.client.send(Cancel([request_id]))


def config(decode: DecodeConfig | None = None, drain_timeout: float = 5.0, model: str = "demo") -> Config:
    return Config(
        path=Path("test.yaml"),
        model=model,
        served_model_name="demo",
        frontend=None,
        decode=decode,
        prefill=PrefillConfig(),
        drain_timeout=drain_timeout,
    )


def shared_queue(broker: MemoryBroker) -> MemoryQueue:
    """Return a connection to the workers' queue, for a test that acts as another process."""
    queue = MemoryQueue(broker)
    queue.bind(LOADED)
    return queue


@asynccontextmanager
async def living(worker: EngineWorker) -> AsyncIterator["asyncio.Task[None]"]:
    life = asyncio.create_task(worker.run())
    try:
        await until(lambda: worker.ready.is_set() or life.done())
        yield life
    finally:
        life.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await life


@dataclass
class Started(Generic[W]):
    worker: W
    engine: SimEngine
    life: "asyncio.Task[None]"

    @property
    def id(self) -> str:
        return self.worker.id

    async def frees_all(self) -> None:
        await until(self.engine.all_blocks_free)


@dataclass
class Decoding(Started[W]):
    frontend: FrontendStream
    """A frontend that is connected to this worker alone."""


Prefill = Started[PrefillWorker]


class Seams(AsyncExitStack):
    """`async with Seams() as seams`: queue and registry in memory, and the workers that a test starts. A worker's name
    begins with its role."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.registry = MemoryServer()
        self.broker = MemoryBroker(ack_wait=0.5)

    @property
    def depth(self) -> int:
        return shared_queue(self.broker).depth

    def make(self, kind: type[W], name: str, engine: SimEngine | None = None) -> W:
        role, number = name.rsplit("-", 1)
        return kind(
            self.config,
            Slot(Role(role), int(number) if number.isdigit() else 0),
            name,
            engine or SimEngine(spec(Role(role), name)),
            MemoryRegistry(self.registry, "t"),
            MemoryQueue(self.broker),
            TcpStreamServer("127.0.0.1") if kind.work.includes(Role.DECODE) else None,
        )

    async def start(self, worker: W) -> Started[W]:
        life = await self.enter_async_context(living(worker))
        assert isinstance(worker._engine, SimEngine)
        return Started(worker, worker._engine, life)

    async def start_decoding(self, worker: W) -> Decoding[W]:
        started = await self.start(worker)
        assert worker._stream is not None
        frontend = await self.frontend_of(worker._stream.address, f"frontend-of-{worker.id}")
        return Decoding(worker, started.engine, started.life, frontend)

    async def frontend_of(self, address: str, name: str) -> FrontendStream:
        return await self.enter_async_context(FrontendStream(address, name))

    async def queue(self) -> MemoryQueue:
        """Connect one more process to the queue, for a test that acts as a prefill worker."""
        return await self.enter_async_context(shared_queue(self.broker))

    async def registry_of_another(self) -> MemoryRegistry:
        """Connect one more process to the registry."""
        return await self.enter_async_context(MemoryRegistry(self.registry, "t"))


def sees(worker: EngineWorker, name: str) -> bool:
    return name in {other.id for other in worker.view.instances(Role.PREFILL)}


class WorkerGraph(Seams):
    """`async with WorkerGraph() as graph`: one decode worker; `prefill` adds prefill workers."""

    def __init__(
        self,
        drain_timeout: float = 5.0,
        engine: type[SimEngine] = SimEngine,
        model: str = "demo",
        **decode: object,
    ) -> None:
        settings = {"remote_prefill": True, "max_local_prefill_length": 32, "max_prefill_queue_size": 4}
        decoding = DecodeConfig(**(settings | decode))  # type: ignore[arg-type]
        super().__init__(config(decoding, drain_timeout, model))
        self.decode_engine = engine(spec(Role.DECODE, "decode-0"))
        self.decode = self.make(DecodeWorker, "decode-0", self.decode_engine)
        assert isinstance(self.decode._stream, TcpStreamServer)
        self.stream = self.decode._stream

    async def __aenter__(self) -> Self:
        self.life = (await self.start(self.decode)).life
        return self

    async def prefill(
        self, name: str = "prefill-0", *, drop_transfers: bool = False, **arguments: object
    ) -> Prefill:
        """Start a prefill worker; return when the decode worker sees it."""
        engine = SimEngine(spec(Role.PREFILL, name, **arguments))
        engine.faults.drop_transfers = drop_transfers
        started = await self.start(self.make(PrefillWorker, name, engine))
        await until(lambda: sees(self.decode, name))
        return started

    async def act_prefill(self, name: str = "prefill-x", model: str = "demo") -> "ActedPrefill":
        acted = ActedPrefill(self, name, model, await self.registry_of_another(), await self.queue())
        await acted.queue.expect_addressed(name)
        await acted.register()
        await until(lambda: sees(self.decode, name))
        return acted

    async def frontend(self, name: str = "frontend-0") -> FrontendStream:
        return await self.frontend_of(self.stream.address, name)

    def request(self, request_id: str) -> DecodeRequest:
        request = self.decode.requests.get(request_id)
        assert request is not None
        return request

    async def frees_all(self) -> None:
        await until(self.decode_engine.all_blocks_free)


@dataclass
class ActedPrefill:
    """A registered prefill worker whose messages the test sends itself."""

    graph: WorkerGraph
    name: str
    model: str
    registry: MemoryRegistry
    queue: MemoryQueue

    async def register(self, **state: Any) -> None:
        instance = Instance(self.name, Role.PREFILL, self.model, wire=WIRE, fingerprint=LOADED, **state)
        await self.registry.put(f"instances/prefill/{self.name}", encode_record(instance))

    async def leave(self) -> None:
        await self.registry.delete(f"instances/prefill/{self.name}")

    async def pull(self, requests: int = 1) -> list[Delivery]:
        return await self.queue.pull(requests, 5.0)

    async def start(self, request_id: str, queued: float = 0.0) -> None:
        """Report that the worker pulled a request."""
        await self.answer(PrefillStarted(request_id, self.name, queued))
        await until(lambda: self.graph.request(request_id).prefiller == self.name)

    async def answer(self, *answers: PrefillAnswer) -> None:
        for answer in answers:
            await self.queue.answer("decode-0", answer)


def handle(prompt: list[int], **changes: object) -> KvHandle:
    """A handle of the prompt's KV at `prefill-x`, which cannot be read."""
    values: dict[str, object] = {
        "engine_id": "prefill-x",
        "request_id": "p",
        "host": "127.0.0.1",
        "port": 1,
        "block_ids": [list(range(-(-len(prompt) // 16)))],
        "num_tokens": len(prompt),
        "block_size": 16,
        "fingerprint": LOADED,
    }
    return KvHandle(**(values | changes))  # type: ignore[arg-type]


class BothWorkers(Seams):
    """`async with BothWorkers() as pair`: two workers of role `both`, each with its own frontend."""

    def __init__(self) -> None:
        decode = DecodeConfig(
            role="both", remote_prefill=True, max_local_prefill_length=32, max_prefill_queue_size=4
        )
        super().__init__(config(decode))

    async def __aenter__(self) -> Self:
        one, other = (self.make(BothWorker, name) for name in ("both-0", "both-1"))
        self.a, self.b = await asyncio.gather(self.start_decoding(one), self.start_decoding(other))
        await until(lambda: sees(one, other.id) and sees(other, one.id))
        return self

    async def prefill(self, name: str) -> Prefill:
        """Start a prefill worker; return when both workers see it."""
        started = await self.start(self.make(PrefillWorker, name))
        await until(lambda: sees(self.a.worker, name) and sees(self.b.worker, name))
        return started
