"""Decode and prefill workers on simulated engines and in-memory seams, for tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from pdserve.config.schema import Config, DecodeConfig, PrefillConfig
from pdserve.decode.worker import DecodeWorker
from pdserve.engine.sim.engine import SimEngine
from pdserve.engine.sim.wire import CoreOutputs
from pdserve.messages import Cancel, Failed, Load, Outputs, Placed, Refused, Submit, ToFrontend, WorkerLoad
from pdserve.plan.slots import Slot
from pdserve.prefill.worker import PrefillWorker
from pdserve.records import Role
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer
from tests.conditions import until
from tests.engine.sims import LOADED, body, decode_outputs, spec
from tests.memory.queue import MemoryBroker, MemoryQueue
from tests.memory.registry import MemoryRegistry, MemoryServer

_numbers = count()


@dataclass
class Answered:
    """What a frontend got for one request."""

    placed: Placed | None = None
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    failed: Failed | None = None

    @property
    def over(self) -> bool:
        return self.finished or self.failed is not None

    @property
    def way(self) -> tuple[str, str]:
        """How the prompt was prefilled, and why."""
        assert self.placed is not None
        return self.placed.prefill, self.placed.reason


class FrontendStream:
    """The other end of a decode worker's stream."""

    def __init__(self, address: str, name: str = "frontend-0") -> None:
        self.client = TcpStreamClient(address, name)
        self.answered: dict[str, Answered] = {}
        self.refused: list[Refused] = []
        self.loads: list[Load] = []
        self.messages: list[ToFrontend] = []

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        self.reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reader.cancel()
        await asyncio.gather(self.reader, return_exceptions=True)
        await self.client.__aexit__(kind, error, trace)

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
                    self._outputs(decode_outputs(frames[:1]))  # tensors come behind

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
        **sampling: int,
    ) -> str:
        request_id = request_id or f"r{next(_numbers)}"
        self.answered.setdefault(request_id, Answered())
        await self.client.send(Submit(request_id, prompt, seconds, body(max_tokens, **sampling)))
        return request_id

    async def ask(self, prompt: list[int], max_tokens: int = 4, **sampling: int) -> Answered:
        return await self.end_of(await self.submit(prompt, max_tokens, 30.0, "", **sampling))

    async def end_of(self, request_id: str) -> Answered:
        await until(lambda: self.answered[request_id].over, within=10)
        return self.answered[request_id]

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
    """As the workers of `spec` have it: for a test that acts another process."""
    queue = MemoryQueue(broker)
    queue.bind(LOADED)
    return queue


class WorkerGraph:
    """`async with WorkerGraph() as graph`: one decode worker, and what `prefill` adds."""

    def __init__(
        self,
        drain_timeout: float = 5.0,
        engine: type[SimEngine] = SimEngine,
        model: str = "demo",
        **decode: object,
    ) -> None:
        settings = {"remote_prefill": True, "max_local_prefill_length": 32, "max_prefill_queue_size": 4}
        self.registry = MemoryServer()
        self.broker = MemoryBroker(ack_wait=0.5)
        self.config = config(DecodeConfig(**(settings | decode)), drain_timeout, model)  # type: ignore[arg-type]
        self.decode_engine = engine(spec(Role.DECODE, "decode-0"))
        self.stream = TcpStreamServer("127.0.0.1")
        self.decode = DecodeWorker(
            self.config,
            Slot(Role.DECODE, 0),
            "decode-0",
            self.decode_engine,
            MemoryRegistry(self.registry, "t"),
            MemoryQueue(self.broker),
            self.stream,
        )

    @property
    def depth(self) -> int:
        return shared_queue(self.broker).depth

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        self.life = await self._stack.enter_async_context(living(self.decode))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def prefill(
        self, name: str = "prefill-0", *, drop_transfers: bool = False, **arguments: object
    ) -> "Prefill":
        """A prefill worker that the decode worker knows of when this returns."""
        engine = SimEngine(spec(Role.PREFILL, name, **arguments))
        engine.faults.drop_transfers = drop_transfers
        worker = self.prefill_worker(name, engine)
        life = await self._stack.enter_async_context(living(worker))
        await until(lambda: name in {worker.id for worker in self.decode.view.instances(role=Role.PREFILL)})
        return Prefill(worker, engine, life)

    def prefill_worker(self, name: str, engine: SimEngine) -> PrefillWorker:
        registry, queue = MemoryRegistry(self.registry, "t"), MemoryQueue(self.broker)
        return PrefillWorker(self.config, Slot(Role.PREFILL, 0), name, engine, registry, queue)

    async def queue(self) -> MemoryQueue:
        """One more process on the queue: a test that acts a prefill worker by hand."""
        return await self._stack.enter_async_context(shared_queue(self.broker))

    async def registry_of_another(self) -> MemoryRegistry:
        return await self._stack.enter_async_context(MemoryRegistry(self.registry, "t"))

    async def frontend(self, name: str = "frontend-0") -> FrontendStream:
        return await self._stack.enter_async_context(FrontendStream(self.stream.address, name))


@dataclass
class Prefill:
    worker: PrefillWorker
    engine: SimEngine
    life: "asyncio.Task[None]"


@asynccontextmanager
async def living(worker: DecodeWorker | PrefillWorker) -> AsyncIterator["asyncio.Task[None]"]:
    life = asyncio.create_task(worker.run())
    try:
        await until(lambda: worker.ready.is_set() or life.done())
        yield life
    finally:
        life.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await life
