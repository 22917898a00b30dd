"""A decode worker in this process, on an in-process stream: tokens are a pure function of what stands before them, so
that a request moved to another worker must go on with the same ones. Steps are made by hand or by a task."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from pdserve.errors import PeerGone
from pdserve.messages import (
    Cancel,
    Failed,
    Hello,
    Instance,
    Outputs,
    Placed,
    Refused,
    Role,
    Submit,
    ToDecode,
    ToFrontend,
)
from pdserve.processor.vllm_api import VERSION
from pdserve.stream.base import StreamClient

FIRST, MANY = 300, 600
"""the tokens it says: plain words of the demo tokenizer"""


def next_token(context: list[int]) -> int:
    return FIRST + zlib.crc32(repr((len(context), context[-6:])).encode()) % MANY


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(next_token(prompt + tokens))
    return tokens


@dataclass
class Job:
    submit: Submit
    request: EngineCoreRequest
    said: list[int] = field(default_factory=list)


class EchoClient(StreamClient):
    def __init__(self, worker: "EchoWorker") -> None:
        self._worker = worker
        self._inbox: asyncio.Queue[ToFrontend | None] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        if not self._worker.alive:
            raise PeerGone(self._worker.id)
        self._worker.clients.append(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in self._worker.clients:
            self._worker.clients.remove(self)

    async def send(self, message: ToDecode) -> None:
        if not self._worker.alive:
            raise PeerGone(self._worker.id)
        self._worker.take(message)

    async def received(self) -> AsyncIterator[ToFrontend]:
        while (message := await self._inbox.get()) is not None:
            yield message
        raise PeerGone(self._worker.id)

    def put(self, message: ToFrontend | None) -> None:
        self._inbox.put_nowait(message)


class EchoWorker:
    def __init__(self, id: str, model: str = "demo", *, pace: float | None = 0.0, prefill: str = "local") -> None:
        self.id = id
        self.instance = Instance(
            id, Role.DECODE, model, address=f"echo:{id}", vllm_version=VERSION, max_concurrency=4.0
        )
        self.alive = True
        self.clients: list[EchoClient] = []
        self.jobs: dict[str, Job] = {}
        self.seen: list[Submit] = []
        self.requests: list[EngineCoreRequest] = []
        self.cancelled: list[str] = []
        self.hello = ""
        self.fail: Failed | None = None
        """answered to every request instead of tokens, under that request's id"""
        self._prefill = prefill
        self._pace = pace
        """seconds between steps; None: only `step()` makes them"""
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder()
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        if self._pace is not None:
            self._spawn(self._run(self._pace))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.die()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def die(self) -> None:
        """As SIGKILL: whoever is connected finds it gone."""
        self.alive = False
        self.jobs.clear()
        for client in self.clients:
            client.put(None)

    def take(self, message: ToDecode) -> None:
        match message:
            case Hello(version):
                self.hello = version
            case Cancel(ids):
                self.cancelled += ids
                for request_id in ids:
                    self.jobs.pop(request_id, None)
            case Submit():
                self._submit(message)
        self._tell()

    def send(self, message: ToFrontend) -> None:
        for client in self.clients:
            client.put(message)

    def refuse(self, text: str) -> None:
        self.send(Refused(text))

    def step(self) -> None:
        """One token for every request, in one message, as an engine does it."""
        outputs = [self._speak(job) for job in list(self.jobs.values())]
        if outputs:
            self.send(Outputs([bytes(part) for part in self._encoder.encode(EngineCoreOutputs(outputs=outputs))]))
            self._tell()

    def garbage(self) -> None:
        self.send(Outputs([b"\xc1 no msgpack"]))

    async def until(self, condition: Any) -> None:
        """Until the condition, asked after each message and step, holds."""
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(condition)

    def _submit(self, submit: Submit) -> None:
        assert submit.request_id not in {one.request_id for one in self.seen}, "a request id came twice"
        request = self._decoder.decode(submit.body)
        self.seen.append(submit)
        self.requests.append(request)
        if self.fail is not None:
            self.send(Failed(submit.request_id, self.fail.message, self.fail.retry))
            return
        self.send(Placed(submit.request_id, self._prefill, "test"))
        self.jobs[submit.request_id] = Job(submit, request)

    def _speak(self, job: Job) -> EngineCoreOutput:
        token = next_token(job.submit.prompt + job.said)
        job.said.append(token)
        params = job.request.sampling_params
        done = len(job.said) >= params.max_tokens
        output = EngineCoreOutput(job.submit.request_id, [token])
        if params.logprobs is not None:
            output.new_logprobs = _logprobs(token, params.logprobs)
        if done:
            output.finish_reason = FinishReason.LENGTH
            del self.jobs[job.submit.request_id]
        return output

    async def _run(self, pace: float) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self.jobs)
            await asyncio.sleep(pace)
            self.step()

    def _tell(self) -> None:
        async def tell() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._spawn(tell())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _logprobs(token: int, count: int) -> LogprobsLists:
    ids = np.array([[token, *range(FIRST, FIRST + count)]], dtype=np.int32)
    values = np.linspace(-0.5, -3.0, count + 1, dtype=np.float32).reshape(1, -1)
    return LogprobsLists(ids, values, np.array([1], dtype=np.int32))
