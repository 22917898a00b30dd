"""A decode worker in this process, without an engine. Each token is a pure function of the tokens before it, so that a
migrated request gets the same tokens. A task makes the steps, or a test calls `step`."""

import asyncio
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from msgspec.structs import replace
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from pdserve.contract.messages import (
    ArchivePart,
    Cancel,
    Failed,
    GetArchive,
    Hello,
    Outputs,
    Placed,
    Submit,
    ToDecode,
    ToFrontend,
)
from pdserve.contract.records import Instance, Role
from pdserve.frontend.vllm.api_server import VERSION
from pdserve.stream.tcp import TcpStreamServer
from pdserve.util.errors import PeerGone

FIRST, MANY = 300, 600
"""generated ids are FIRST to FIRST + MANY - 1, all words of the demo tokenizer"""


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
    generated: list[int] = field(default_factory=list)
    steps: int = 0


@dataclass
class Step:
    """A request's output of one step."""

    tokens: list[int]
    finish: FinishReason | None = None
    stop: int | None = None


@dataclass
class EchoWorker:
    id: str
    model: str = "demo"
    pace: float | None = 0.0
    """seconds between steps; None: only `step()` makes them"""
    prefill: str = "local"
    asks: bool = False
    """send no `Placed`, as a worker does while a prompt waits for a prefill worker"""
    at_once: int = 0
    """its slots (`max_num_seqs`); 0: not published"""
    loaded: str = ""
    """its fingerprint"""
    role: Role = Role.DECODE
    metrics: str = ""
    """URL of its metrics page"""
    instance: Instance = field(init=False)
    """set on entering"""
    jobs: dict[str, Job] = field(default_factory=dict)
    seen: list[Submit] = field(default_factory=list)
    requests: list[EngineCoreRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    hello: str = ""
    script: list[Step] | None = None
    """the steps of every request, in place of `next_token`"""
    shift: int = 0
    """added to each token, as if the worker had other weights"""
    fail: Failed | None = None
    """reply to every request in place of tokens, under that request's id"""
    archive: bytes = b""
    """of the model; sent when `archive_sent` is set, or at once if that is None"""
    archive_sent: asyncio.Event | None = None
    archives_asked: int = 0

    def __post_init__(self) -> None:
        self.placed = Placed("", self.prefill, "test")
        """sent for every request (unless `asks` or `fail` is set), under that request's id"""
        self._stream = TcpStreamServer("127.0.0.1")
        self._frontends: dict[str, None] = {}
        self._alive = True
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder()
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        self.instance = Instance(
            self.id,
            self.role,
            self.model,
            address=self._stream.address,
            vllm_version=VERSION,
            max_concurrency=4.0,
            max_num_seqs=self.at_once,
            fingerprint=self.loaded,
            metrics=self.metrics,
        )
        self._spawn(self._read())
        if self.pace is not None:
            self._spawn(self._run(self.pace))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def die(self) -> None:
        """Close all connections, as SIGKILL would."""
        if self._alive:
            self._alive = False
            self.jobs.clear()
            await self._stream.__aexit__(None, None, None)

    async def _read(self) -> None:
        async for frontend, message in self._stream.received():
            if message is not None:
                self._frontends[frontend] = None
                await self._take(frontend, message)

    async def _take(self, frontend: str, message: ToDecode) -> None:
        match message:
            case GetArchive():
                self.archives_asked += 1
                await self._tell()
                if self.archive_sent is not None:
                    await self.archive_sent.wait()
                for part in (self.archive[:100], self.archive[100:], b""):
                    await self._stream.send(frontend, ArchivePart(part))
            case Hello(version):
                self.hello = version
            case Cancel(ids):
                self.cancelled += ids
                for request_id in ids:
                    self.jobs.pop(request_id, None)
            case Submit():
                await self._submit(message)
        await self._tell()

    async def send(self, message: ToFrontend) -> None:
        for frontend in self._frontends:
            with suppress(PeerGone):
                await self._stream.send(frontend, message)

    def go(self) -> None:
        """Make steps from now on."""
        self._spawn(self._run(0.0))

    async def step(self) -> None:
        """Make one step for every request, and send all outputs in one message."""
        outputs = [self._generate(job) for job in list(self.jobs.values())]
        if outputs:
            body = [bytes(part) for part in self._encoder.encode(EngineCoreOutputs(outputs=outputs))]
            await self.send(Outputs(body))
            await self._tell()

    async def until(self, condition: Any) -> None:
        """Wait until the condition holds, which is checked after each message and step."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(condition)

    async def _submit(self, submit: Submit) -> None:
        assert submit.request_id not in {seen.request_id for seen in self.seen}, "a request id came twice"
        request = self._decoder.decode(submit.body)
        self.seen.append(submit)
        self.requests.append(request)
        if self.fail is not None:
            await self.send(replace(self.fail, request_id=submit.request_id))
            return
        if not self.asks:
            await self.send(replace(self.placed, request_id=submit.request_id))
        self.jobs[submit.request_id] = Job(submit, request)

    def _generate(self, job: Job) -> EngineCoreOutput:
        if self.script is not None:
            step, job.steps = self.script[job.steps], job.steps + 1
            if step.finish is not None:
                del self.jobs[job.submit.request_id]
            return EngineCoreOutput(
                job.submit.request_id, step.tokens, finish_reason=step.finish, stop_reason=step.stop
            )
        token = next_token(job.submit.prompt + job.generated) + self.shift
        job.generated.append(token)
        params = job.request.sampling_params
        done = len(job.generated) >= params.max_tokens
        output = EngineCoreOutput(job.submit.request_id, [token])
        if params.logprobs is not None:
            output.new_logprobs = _logprobs(token, params.logprobs)
        if params.prompt_logprobs is not None and len(job.generated) == 1:
            output.new_prompt_logprobs_tensors = _prompt_logprobs(job.submit.prompt, params.prompt_logprobs)
        if done:
            output.finish_reason = FinishReason.LENGTH
            del self.jobs[job.submit.request_id]
        return output

    async def _run(self, pace: float) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self.jobs)
            await asyncio.sleep(pace)
            await self.step()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _logprobs(token: int, count: int) -> LogprobsLists:
    ids = np.array([[token, *range(FIRST, FIRST + count)]], dtype=np.int32)
    values = np.linspace(-0.5, -3.0, count + 1, dtype=np.float32).reshape(1, -1)
    return LogprobsLists(ids, values, np.array([1], dtype=np.int32))


def _prompt_logprobs(prompt: list[int], count: int) -> LogprobsTensors:
    """Return logprobs of all prompt tokens but the first."""
    others = torch.arange(FIRST, FIRST + count).repeat(len(prompt) - 1, 1)
    ids = torch.cat([torch.tensor(prompt[1:]).unsqueeze(1), others], 1)
    values = torch.linspace(-0.5, -3.0, count + 1).repeat(len(prompt) - 1, 1)
    return LogprobsTensors(ids, values, torch.ones(len(prompt) - 1, dtype=torch.int64))
