"""Two real vLLM engines, decode and prefill, with KV over UCX between them: started once, and killed by the
last test.

UCX may use only TCP. Otherwise, within one host, it would read the other process's memory directly, even while
that process is stopped."""

import asyncio
import itertools
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio
import torch
from pdserve_bench.chaos.processes.network_cut import _duplicate, _ends
from prometheus_client import REGISTRY
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.ops import logprobs
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from pdserve.contract.messages import KvHandle
from pdserve.contract.prefixes import block_names
from pdserve.contract.records import Role
from pdserve.engine.base import Output, Step, Transfers
from pdserve.engine.spec import EngineSpec
from pdserve.engine.vllm.api import (
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
    encode_request,
)
from pdserve.engine.vllm.engine import VllmEngine
from pdserve.kv import PREEMPTED, side_channel
from pdserve.plan.machine import GIB
from pdserve.plan.memory import size
from pdserve.plan.model_folder import read_model
from pdserve.process import engine_checks
from pdserve.runtime.tasks import TaskOwner
from pdserve.security.credentials import create
from pdserve.util.errors import EngineDead, ProtocolError
from tests.conditions import until

pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]

MODEL = str(Path(__file__).parents[2] / "pdserve/demo/model")
BLOCK = 32
BLOCK_BYTES = BLOCK * 2 * 4 * 2 * 64 * 4
"""tokens x (keys, values) x layers x heads x head size x bytes of float32"""
ARGUMENTS = {
    "enforce-eager": True,
    "max-model-len": 4096,
    "max-num-seqs": 32,
    "max-num-batched-tokens": 2048,
    "block-size": BLOCK,
    "dtype": "float32",  # in bfloat16 a batch's size alone changes tokens
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "UCX_TLS": "tcp",
}


@dataclass
class Driven:
    """An engine and the reader of its steps."""

    engine: VllmEngine
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    transfers: list[Transfers] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    """requests whose KV could not be read, and why"""
    unreachable: list[str] = field(default_factory=list)
    complete: list[KvHandle] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    killed: bool = False

    async def read(self) -> None:
        while True:
            step = await self.engine.step()
            if step.transfers:
                self.transfers.append(step.transfers)
            self.released += step.released
            assert not self.unread.keys() & step.unread, "reported once"
            self.unread |= step.unread
            self.unreachable += step.unreachable
            self.complete += step.complete
            self.steps.append(step)
            for output in step.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)

    async def end(self, request_id: str, within: float = 60) -> list[int]:
        await until(
            lambda: bool(self.outputs.get(request_id, []) and self.outputs[request_id][-1].finished), within
        )
        return tokens_of(self.outputs[request_id])

    async def answer(
        self, request_id: str, prompt: list[int], wanted: list[bytes], kv: KvHandle | None = None
    ) -> list[Output]:
        """Return all outputs of a request after its end."""
        await self.engine.generate(request_id, prompt, wanted, kv)
        await self.end(request_id)
        return self.outputs[request_id]

    async def generate(self, request_id: str, prompt: list[int], kv: KvHandle | None = None) -> list[int]:
        return tokens_of(await self.answer(request_id, prompt, body(), kv))

    async def prefill(self, request_id: str, prompt: list[int]) -> KvHandle:
        await self.engine.prefill(request_id, prompt, body())
        await self.end(request_id)
        handle = self.outputs[request_id][-1].handle
        assert handle is not None
        return handle

    @property
    def bytes(self) -> int:
        return sum(moved.bytes for moved in self.transfers)

    @property
    def failures(self) -> int:
        return sum(moved.failures for moved in self.transfers)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the engine's processes in the block."""
        for process in self.engine.processes:
            process.suspend()
        while any(process.status() != psutil.STATUS_STOPPED for process in self.engine.processes):
            time.sleep(0.01)
        try:
            yield
        finally:
            for process in self.engine.processes:
                process.resume()

    def kill(self) -> None:
        self.killed = True
        for process in self.engine.processes:
            process.kill()


@dataclass
class Engines:
    decode: Driven
    prefill: Driven

    async def first(self, name: str, prompt: list[int], wanted: list[bytes]) -> tuple[KvHandle, list[Output]]:
        """Return the prompt's handle, and the first output if the prefill engine may sample it."""
        await self.prefill.engine.prefill(f"p-{name}", prompt, wanted)
        await self.prefill.end(f"p-{name}")
        (done,) = self.prefill.outputs[f"p-{name}"]
        assert done.handle is not None
        if not done.tokens:
            return done.handle, []
        packed = self.prefill.engine.pack([done])
        output = self.decode.engine.first_output(name, prompt, wanted, packed)
        assert output is not None
        return done.handle, [output]

    async def go_on(
        self, name: str, prompt: list[int], wanted: list[bytes], kv: KvHandle, first: list[Output]
    ) -> list[Output]:
        """Return all outputs of the request after its end."""
        if first and first[0].finished:
            await self.decode.engine.reject(kv)
            return first
        await self.decode.engine.generate(name, prompt, wanted, kv, tokens_of(first))
        await self.decode.end(name)
        return first + self.decode.outputs[name]

    async def hand_over(self, name: str, prompt: list[int], wanted: list[bytes]) -> list[Output]:
        """Return a request's outputs after prefill in one engine and decode in the other."""
        return await self.go_on(name, prompt, wanted, *await self.first(name, prompt, wanted))

    async def all_free(self) -> None:
        """Wait until all blocks are free. Each wait is shorter than a KV lease, whose end would free them too."""
        await until(self.decode.engine.all_blocks_free, 20)
        await until(self.prefill.engine.all_blocks_free, 20)


@contextmanager
def _recording(log: Path) -> Iterator[None]:
    """Have each process of an engine write into `log` when it asks for AMX, loads the model, or ranks logprobs. Engines
    are forked from this process, and inherit the replaced functions."""

    def recorded(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **named: Any) -> Any:
            with log.open("a") as out:
                out.write(f"{os.getpid()} {what}\n")
            return function(*args, **named)

        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_init_amx", recorded("AMX", torch.cpu._init_amx))
        patch.setattr(CPUModelRunner, "load_model", recorded("model", CPUModelRunner.load_model))
        ranks = logprobs.batched_count_greater_than
        patch.setattr(ranks, "__wrapped__", recorded("ranks", ranks.__wrapped__))
        yield


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded") / "log"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(recorded: Path) -> AsyncIterator[Engines]:
    async with two_engines(recorded, {}, {}) as pair:
        yield pair


@asynccontextmanager
async def two_engines(
    recorded: Path,
    decode: Mapping[str, object],
    prefill: Mapping[str, object],
    roles: tuple[Role, Role] = (Role.DECODE, Role.PREFILL),
    model: str = MODEL,
) -> AsyncIterator[Engines]:
    """`decode`, `prefill`: further arguments of these engines."""
    credentials = create(recorded.parent / "credentials")
    driven = []
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for variable, value in ENVIRONMENT.items():
            patch.setenv(variable, value)
        # a socket's path may have at most 107 characters
        patch.setenv("VLLM_RPC_BASE_PATH", stack.enter_context(TemporaryDirectory(prefix="pdserve-")))
        readers = await stack.enter_async_context(TaskOwner())
        for part, role, more in zip(("decode", "prefill"), roles, (decode, prefill), strict=True):
            name = f"{part}-0-test"
            arguments = {**ARGUMENTS, **more}
            spec = EngineSpec(role, name, model, engine_args=arguments, credentials=credentials)
            with _recording(recorded):
                driven.append(Driven(await stack.enter_async_context(VllmEngine(spec))))
            readers.start(driven[-1].read(), name)
        pair = Engines(*driven)
        # This prompt connects the engines. Without a connection, unread KV is held until its lease ends.
        prompt = prompt_of(40, seed=99)
        await pair.decode.generate("connects", prompt, await pair.prefill.prefill("p-connects", prompt))
        await pair.all_free()
        yield pair


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_left(pair: Engines) -> AsyncIterator[None]:
    """After each test, wait until all blocks of both engines are free. The check also empties the prefix caches."""
    yield
    if not pair.decode.killed:
        await pair.all_free()


def body(max_tokens: int = 8, **sampling: object) -> list[bytes]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **sampling)
    return encode_request(EngineCoreRequest("", None, None, params, None, time.time(), None, None, None))


def sampled(max_tokens: int = 4, **params: Any) -> list[bytes]:
    """The body of a request that may end at the model's end of sequence, here token `eos`."""
    eos = params.pop("eos", None)
    sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **params})
    sampling._eos_token_id = eos
    sampling._all_stop_token_ids = {*sampling.stop_token_ids, *([] if eos is None else [eos])}
    return encode_request(EngineCoreRequest("", None, None, sampling, None, time.time(), None, None, None))


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def said(outputs: list[Output]) -> list[object]:
    """Return all that a client could see of the outputs."""
    found: list[object] = []
    for raw in (output.raw for output in outputs):
        ranked = raw.new_logprobs and [array.tolist() for array in raw.new_logprobs[:3]]
        found.append((raw.new_token_ids, raw.finish_reason, raw.stop_reason, ranked))
    return found


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [300 + (i * i + 7 * seed + length) % 700 for i in range(length)]


async def test_engine_processes_are_as_planned_and_work_around_faults(pair: Engines, recorded: Path) -> None:
    """Each engine asks for AMX before it loads the model. An engine with one rank computes in its core process. The
    ranking of logprobs is not compiled, because all requests would wait for the compilation."""
    planned = size(read_model(Path(MODEL)), ARGUMENTS, None, cpu_kv=GIB)
    assert {driven.engine.facts.kv_blocks for driven in (pair.decode, pair.prefill)} == {planned.blocks}
    lines = [line.split() for line in (await asyncio.to_thread(recorded.read_text)).splitlines()]
    workers = {pid for pid, what in lines if what == "model"}
    assert workers == {str(p.pid) for p in all_processes(pair) if p.name() == "VLLM::EngineCore"}
    assert not [process for process in all_processes(pair) if "Worker" in process.name()]
    assert [[what for pid, what in lines if pid == worker] for worker in workers] == [["AMX", "model"]] * 2
    await pair.decode.answer("ranks", prompt_of(20), body(logprobs=1))
    assert (await asyncio.to_thread(recorded.read_text)).split().count("ranks") == 8, "once for each token"


def all_processes(pair: Engines) -> list[psutil.Process]:
    return [*pair.decode.engine.processes, *pair.prefill.engine.processes]


async def test_a_step_computes_as_many_prompt_tokens_as_the_limit(pair: Engines) -> None:
    driven = pair.decode
    await driven.engine.generate("running", prompt_of(20), body(2000), None)
    await until(lambda: "running" in driven.outputs)
    beside = {}
    for tokens in (64, 384):
        await driven.engine.limit_chunk(tokens)
        since = len(driven.steps)
        beside[tokens] = await driven.generate(f"within-{tokens}", prompt_of(1000, seed=tokens))
        steps = [step for step in driven.steps[since:] if step.prompt_tokens]
        assert max(step.prompt_tokens for step in steps) == tokens
        assert sum(step.prompt_tokens for step in steps) == 1000
        assert all(a.ended < b.ended for a, b in itertools.pairwise(steps))
    await driven.engine.limit_chunk(0)
    await driven.engine.cancel(["running"])
    await pair.all_free()
    for tokens, found in beside.items():
        assert await driven.generate(f"alone-{tokens}", prompt_of(1000, seed=tokens)) == found


async def test_a_request_whose_kv_was_read_does_not_wait_for_a_chunk(pair: Engines) -> None:
    driven, length = pair.decode, 700
    kv = await pair.prefill.prefill("p-comes", prompt_of(length))
    await driven.engine.limit_chunk(256)
    await driven.engine.generate("long", prompt_of(4000, seed=8), body(1), None)
    await driven.engine.generate("runs", prompt_of(20), body(400), None)
    await until(lambda: "runs" in driven.outputs)
    await driven.engine.generate("comes", prompt_of(length), body(4), kv)
    await driven.end("comes")
    step = next(step for step in driven.steps if any(each.request_id == "comes" for each in step.outputs))
    assert step.prompt_tokens <= BLOCK + 1
    assert not driven.outputs["comes"][0].recomputed
    await driven.engine.limit_chunk(0)
    await driven.engine.cancel(["runs", "long"])


@pytest.mark.parametrize("length", [1, 33, 3000])
async def test_remote_prefill_gives_the_tokens_of_a_local_one(pair: Engines, length: int) -> None:
    prompt = prompt_of(length)
    assert pair.decode.engine.prefix_hit(prompt, body(prompt_logprobs=1)) is None, "always computed locally"
    before, handle = len(pair.decode.transfers), await pair.prefill.prefill(f"p-{length}", prompt)
    asked = time.monotonic()
    remote = await pair.decode.generate(f"remote-{length}", prompt, handle)
    begun = pair.decode.outputs[f"remote-{length}"][0].begun
    assert begun is not None
    (read,) = [read for moved in pair.decode.transfers[before:] for read in moved.reads]
    assert read.source == handle.engine_id
    assert read.bytes == -(-length // BLOCK) * BLOCK_BYTES
    assert asked < asked + read.seconds < begun < time.monotonic()
    assert pair.decode.engine.prefix_hit(prompt, body()) == (length - 1) // BLOCK * BLOCK
    prefixes = pair.decode.engine.prefixes
    cached = list(block_names(prompt, BLOCK))[prefixes.stride - 1 :: prefixes.stride]
    assert set(cached) <= set(prefixes.known()) <= set(block_names([*prompt, *remote], BLOCK))
    await pair.all_free()
    assert pair.decode.engine.prefix_hit(prompt, body()) == 0
    assert await pair.decode.generate(f"local-{length}", prompt) == remote
    assert pair.decode.failures == 0


@pytest.mark.parametrize(
    ("length", "cached"), [(1, 0), (31, 0), (32, 0), (700, 0), (96, 64), (96, 96), (97, 96)]
)
async def test_the_first_token_comes_from_prefill(pair: Engines, length: int, cached: int) -> None:
    prompt, name = prompt_of(length, seed=20), f"first-{length}-{cached}"
    whole = await pair.decode.answer(f"whole-{name}", prompt, sampled())
    await pair.all_free()
    if cached:
        await pair.decode.generate(f"cached-{name}", [*prompt[:cached], 299])
    before = pair.decode.bytes
    handed = await pair.hand_over(name, prompt, sampled())
    assert said(handed) == said(whole)
    assert len(handed) == 4
    assert len(pair.decode.outputs[name]) == 3, "each token by one step"
    stats = pair.decode.outputs[name][0].raw.prefill_stats
    assert stats.num_computed_tokens == 1
    assert stats.num_local_cached_tokens == cached
    assert (pair.decode.bytes > before) == (length > cached)


CARRIED: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "one token": lambda _: {"max_tokens": 1},
    "two tokens": lambda _: {"max_tokens": 2},
    "eos": lambda tokens: {"eos": tokens[0]},
    "eos at the end": lambda tokens: {"eos": tokens[0], "max_tokens": 1},
    "eos second": lambda tokens: {"eos": tokens[1]},
    "eos ignored": lambda tokens: {"ignore_eos": True},
    "stop": lambda tokens: {"stop_token_ids": [tokens[0]]},
    "stop second": lambda tokens: {"stop_token_ids": [tokens[1]], "max_tokens": 2},
    "stop not first": lambda tokens: {"stop_token_ids": tokens, "min_tokens": 1},
    "stop not second": lambda tokens: {"stop_token_ids": tokens, "eos": tokens[1], "min_tokens": 2},
    "logprobs": lambda _: {"logprobs": 3},
    "logprobs of two tokens": lambda _: {"logprob_token_ids": [400, 500]},
    "repetition": lambda _: {"repetition_penalty": 1.5},
    "bias": lambda tokens: {"logit_bias": {tokens[0]: -100.0, tokens[2]: -5.0}},
    "allowed": lambda _: {"allowed_token_ids": [400, 401, 402]},
    "temperature, top_k 1": lambda _: {"temperature": 1.0, "top_k": 1},
}
"""parameters under which the prefill engine samples the first token; `tokens`: the prompt's greedy tokens"""
NOT_CARRIED: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "presence": lambda _: {"presence_penalty": 1.5},
    "frequency": lambda _: {"frequency_penalty": 1.5},
    "seed": lambda _: {"temperature": 1.0, "seed": 7},
    "plugin": lambda _: {"extra_args": {"of": "a plugin"}},
    "all logprobs": lambda _: {"logprobs": -1},
    "regex": lambda _: {"structured_outputs": xgrammar(regex="[a-f]{4,8}")},
}


def xgrammar(**grammar: Any) -> StructuredOutputsParams:
    asked = StructuredOutputsParams(**grammar)
    asked._backend = "xgrammar"
    return asked


@pytest.mark.parametrize("case", [*CARRIED, *NOT_CARRIED])
async def test_the_first_token_follows_the_sampling_parameters(pair: Engines, case: str) -> None:
    prompt = prompt_of(50, seed=21)
    tokens = (await pair.decode.generate(f"tokens {case}", prompt))[:4]
    wanted = sampled(**(CARRIED | NOT_CARRIED)[case](tokens))
    whole = await pair.decode.answer(f"whole {case}", prompt, wanted)
    handed = await pair.hand_over(f"handed {case}", prompt, wanted)
    assert said(handed) == said(whole)
    assert bool(pair.prefill.outputs[f"p-handed {case}"][0].tokens) == (case in CARRIED)


async def test_a_seed_gives_the_same_tokens_in_one_step_and_in_two(pair: Engines) -> None:
    """On a CPU, vLLM's engine died if a request had a seed and its prompt took two steps."""
    prompt, wanted = prompt_of(3000, seed=24), sampled(temperature=1.0, seed=7)
    two = await pair.decode.answer("two steps", prompt, wanted)
    one = await pair.decode.answer("one step", prompt, wanted)  # most of the prompt is cached
    assert one[0].raw.prefill_stats.num_local_cached_tokens > 2500
    assert said(two) == said(one) == said(await pair.hand_over("by two", prompt, wanted))
    other = sampled(temperature=1.0, seed=8)
    assert said(await pair.hand_over("other seed", prompt, other)) != said(one)


async def test_a_first_token_may_be_the_last_that_fits(pair: Engines) -> None:
    prompt = prompt_of(4095, seed=22)
    (only,) = await pair.hand_over("full", prompt, sampled())
    assert only.raw.finish_reason == FinishReason.LENGTH
    assert only.tokens == (await pair.decode.generate("full too", prompt))
    assert len(await pair.hand_over("nearly full", prompt[1:], sampled())) == 2


async def test_an_unreadable_first_token_is_ignored(pair: Engines) -> None:
    prompt, engine = prompt_of(40, seed=23), pair.decode.engine
    handle = await pair.prefill.prefill("p-unreadable", prompt)
    good = pair.prefill.engine.pack(pair.prefill.outputs["p-unreadable"])
    for packed in ([], [b"\xff"], [good[0][:-5]], pair.decode.engine.pack([])):
        assert engine.first_output("unreadable", prompt, body(), packed) is None
    output = engine.first_output("readable", prompt, body(), good)
    assert output is not None
    assert (output.request_id, output.finished) == ("readable", False)
    events = output.raw.events
    assert 0 <= engine._timestamp - events[-1].timestamp < 10
    await engine.reject(handle)


async def read_ahead(pair: Engines, name: str, prompt: list[int]) -> KvHandle:
    """Prefill a prompt in two steps and read the first step's KV ahead; return the handle."""
    pair.prefill.complete.clear()
    await pair.prefill.engine.prefill(name, prompt, body())
    await until(lambda: bool(pair.prefill.complete))
    await pair.decode.engine.read_ahead(pair.prefill.complete[0], 0)
    await pair.prefill.end(name)
    assert [(kv.request_id, kv.num_tokens) for kv in pair.prefill.complete] == [(name, 2048)]
    handle = pair.prefill.outputs[name][-1].handle
    assert handle is not None
    return handle


async def test_kv_is_read_while_the_rest_of_the_prompt_is_computed(pair: Engines) -> None:
    """The prefill engine also samples the first token. The prompt fills its last block."""
    prompt = prompt_of(94 * BLOCK, seed=20)
    before, unexpected = pair.decode.bytes, unexpected_notifications()
    handle = await read_ahead(pair, "p-ahead", prompt)
    packed = pair.prefill.engine.pack(pair.prefill.outputs["p-ahead"])
    first = pair.decode.engine.first_output("ahead", prompt, body(), packed)
    assert first is not None
    ahead = tokens_of(await pair.go_on("ahead", prompt, body(), handle, [first]))
    read = pair.decode.bytes - before
    stats = pair.decode.outputs["ahead"][0].raw.prefill_stats
    assert (stats.num_local_cached_tokens, stats.num_external_cached_tokens) == (0, len(prompt)), (
        "no prefix hit"
    )
    assert pair.decode.engine.prefix_hit(prompt, body()) == 93 * BLOCK
    await pair.all_free()
    whole = await pair.decode.generate("at-once", prompt, await pair.prefill.prefill("p-at-once", prompt))
    assert ahead == whole
    assert read == pair.decode.bytes - before - read, "each block is read once"
    assert unexpected_notifications() == unexpected, "vLLM gets no unmatched notifications"
    await pair.all_free()
    assert await pair.decode.generate("here", prompt) == ahead


def unexpected_notifications() -> float:
    """Notifications of reads that vLLM's connector could not match to a prefill."""
    name = "vllm:nixl_num_notifications_after_expiry_total"
    found = [sample for metric in REGISTRY.collect() for sample in metric.samples if sample.name == name]
    assert found
    return sum(sample.value for sample in found)


@pytest.mark.parametrize("preempted", [1, None], ids=["preempted", "unknown"])
async def test_kv_read_ahead_of_a_preempted_prompt_is_read_again(
    pair: Engines, preempted: int | None
) -> None:
    prompt = prompt_of(3000, seed=21)
    before = pair.decode.bytes
    handle = await read_ahead(pair, f"p-preempted-{preempted}", prompt)
    assert handle.extra[PREEMPTED] == 0
    doubtful = msgspec.structs.replace(handle, extra=handle.extra | {PREEMPTED: preempted})
    again = await pair.decode.generate(f"preempted-{preempted}", prompt, doubtful)
    assert pair.decode.bytes - before == (2048 // BLOCK + -(-3000 // BLOCK)) * BLOCK_BYTES
    await pair.all_free()
    assert await pair.decode.generate(f"not-preempted-{preempted}", prompt) == again


async def test_unused_blocks_that_were_read_ahead_are_freed(pair: Engines) -> None:
    prompt = prompt_of(3000, seed=22)
    handle = await read_ahead(pair, "p-dropped", prompt)
    assert not await pair.decode.engine.all_blocks_free()
    await pair.decode.engine.drop_ahead(handle)
    await until(pair.decode.engine.all_blocks_free, 10)
    assert not await pair.prefill.engine.all_blocks_free(), "only `reject` frees the prefill's blocks"
    await pair.decode.engine.reject(handle)
    await pair.all_free()
    await pair.decode.engine.reject(await read_ahead(pair, "p-refused", prompt))
    await pair.all_free()
    handle = await read_ahead(pair, "p-cancelled", prompt)
    await pair.decode.engine.generate("cancelled-ahead", prompt, body(), handle)
    await pair.decode.engine.cancel(["cancelled-ahead"])
    await pair.all_free()
    pair.prefill.complete.clear()
    await pair.prefill.engine.prefill("p-given-up", prompt, body())
    await until(lambda: bool(pair.prefill.complete))
    await pair.prefill.engine.cancel(["p-given-up"])
    await pair.decode.engine.read_ahead(pair.prefill.complete[0], 0)
    await pair.decode.engine.drop_ahead(pair.prefill.complete[0])


async def test_a_salt_separates_prefixes(pair: Engines) -> None:
    prompt = prompt_of(200, seed=2)
    await pair.decode.generate("unsalted", prompt)
    fields = msgspec.msgpack.decode(body()[0])
    fields[7] = "other"
    salted = [msgspec.msgpack.encode(fields)]
    assert pair.decode.engine.prefix_hit(prompt, body())
    assert pair.decode.engine.prefix_hit(prompt, salted) == 0
    await pair.all_free()
    await pair.decode.answer("salted", prompt, salted)
    assert pair.decode.engine.prefix_hit(prompt, salted)
    assert pair.decode.engine.prefix_hit(prompt, body()) == 0


async def test_cancel_frees_both_sides_at_every_phase(pair: Engines) -> None:
    prompt = prompt_of(3000, seed=3)
    await pair.prefill.engine.prefill("computing", prompt, body())
    await until(lambda: pair.prefill.engine.usage.running == 1)
    await pair.prefill.engine.cancel(["computing"])
    await pair.all_free()
    await pair.decode.engine.generate(
        "pulling", prompt, body(), await pair.prefill.prefill("p-pulling", prompt)
    )
    await pair.decode.engine.cancel(["pulling"])
    await pair.all_free()
    await pair.decode.engine.generate("generating", prompt[:200], body(2000), None)
    await until(lambda: len(pair.decode.outputs.get("generating", [])) > 2)
    await pair.decode.engine.cancel(["generating", "unknown"])
    await pair.all_free()
    assert await pair.decode.generate("after", prompt_of(40)) == await pair.decode.generate(
        "again", prompt_of(40)
    )


async def test_kv_that_is_read_or_rejected_is_freed_and_reported_once(pair: Engines) -> None:
    prompt = prompt_of(300, seed=9)

    async def freed(handle: KvHandle) -> None:
        await until(lambda: handle.request_id in pair.prefill.released)
        await until(pair.prefill.engine.all_blocks_free, 10)
        await until(lambda: pair.prefill.engine.usage.kv_usage == 0)

    handle = await pair.prefill.prefill("p-read", prompt)
    assert handle.request_id not in pair.prefill.released
    assert not await pair.prefill.engine.all_blocks_free()
    await pair.decode.generate("read", prompt, handle)
    await freed(handle)
    handle = await pair.prefill.prefill("p-rejected", prompt)
    await pair.decode.engine.reject(handle)
    await freed(handle)
    await pair.decode.engine.reject(handle)
    handle = await pair.prefill.prefill("p-next", prompt_of(40))
    await pair.decode.generate("next", prompt_of(40), handle)
    await freed(handle)
    assert len(set(pair.prefill.released)) == len(pair.prefill.released), "reported once"


async def test_a_prefill_cancelled_too_late_can_be_rejected(pair: Engines) -> None:
    """vLLM had finished the prefill before the cancellation arrived."""
    engine = pair.prefill.engine
    await engine.prefill("p-late", prompt_of(300, seed=10), body())
    (request,) = engine._requests.of(["p-late"])
    engine._requests.drop(request)
    await pair.prefill.end("p-late")
    handle = pair.prefill.outputs["p-late"][-1].handle
    assert handle is not None
    await pair.decode.engine.reject(handle)
    await until(engine.all_blocks_free, 10)


async def test_kv_that_its_engine_no_longer_holds_is_computed_again(pair: Engines) -> None:
    """One request waits until its KV lease has ended, and the decode engine does not notice. Another request names a
    prefill from before the prefill engine's restart."""
    prompt = prompt_of(700, seed=11)
    handle, first = await pair.first("waited", prompt, body())
    await until(pair.prefill.engine.all_blocks_free, within=45)
    failures = pair.decode.failures
    waited = await pair.go_on("waited", prompt, body(), handle, first)
    unknown = msgspec.structs.replace(handle, request_id="of an earlier boot")
    await pair.decode.generate("restarted", prompt[1:], _shorter(unknown))
    assert {"waited", "restarted"} <= pair.decode.unread.keys()
    assert pair.decode.failures == failures + 2
    assert pair.decode.outputs["waited"][0].recomputed
    await pair.all_free()
    assert await pair.decode.generate("not-waited", prompt) == tokens_of(waited)


def _shorter(handle: KvHandle) -> KvHandle:
    return msgspec.structs.replace(handle, num_tokens=handle.num_tokens - 1)


async def test_requests_that_would_kill_vllm_do_not_reach_it(pair: Engines) -> None:
    engine = pair.decode.engine
    handle = await pair.prefill.prefill("p-checks", prompt_of(100, seed=5))
    for change in ({"block_ids": [[1]]}, {"block_size": 64}, {"host": ""}):
        bad = msgspec.structs.replace(handle, **change)
        with pytest.raises(ProtocolError):
            await engine.generate("bad", prompt_of(100, seed=5), body(), bad)
    for prompt in ([], prompt_of(4096)):
        with pytest.raises(ProtocolError):
            await engine.generate("bad", prompt, body(), None)
    with pytest.raises(ProtocolError):
        await engine.generate("bad", prompt_of(10), [b"\xff"], None)
    smuggled = {"kv_transfer_params": {"do_remote_prefill": True}}
    await engine.generate("smuggled", prompt_of(100, seed=6), body(extra_args=smuggled), None)
    assert await pair.decode.end("smuggled") == await pair.decode.generate("plain", prompt_of(100, seed=6))
    with pytest.raises(ProtocolError):
        await engine.generate("plain", prompt_of(10), body(), None)
    await engine.reject(handle)


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({"type": "object", "patternProperties": {"([": {}}}, "cannot be compiled by the engine (xgrammar)"),
        ({"$ref": "#"}, "allows no further token (xgrammar)"),  # it compiles, but no finite text follows it
    ],
)
async def test_a_grammar_that_no_engine_can_follow_is_refused(
    pair: Engines, schema: dict[str, Any], refused: str
) -> None:
    outputs = await pair.decode.answer(refused, prompt_of(50), body(structured_outputs=xgrammar(json=schema)))
    assert outputs[-1].failed
    assert outputs[-1].refused == f"structured_outputs.json {refused}"
    assert await pair.decode.generate(f"after: {refused}", prompt_of(50))


async def test_a_peer_without_credentials_gets_no_handshake(pair: Engines) -> None:
    await pair.prefill.engine.reach()
    with pytest.raises(TimeoutError):
        side_channel.ask(pair.prefill.engine._process.side_channel, 0.5)
    await pair.prefill.engine.reach()


async def test_an_engine_that_answers_no_handshake_is_reported_and_not_asked_again(pair: Engines) -> None:
    prompt = prompt_of(5 * BLOCK, 77)
    handle = await pair.prefill.prefill("deaf-0", prompt)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        lost = msgspec.structs.replace(handle, engine_id="deaf", port=deaf.getsockname()[1])
        tokens = await pair.decode.generate("deaf-1", prompt, lost)
        await pair.decode.engine.all_blocks_free()
        assert await pair.decode.generate("deaf-2", prompt, lost) == tokens
        assert pair.decode.unreachable.count("deaf") == 1, "a second handshake would fail, too"
    await pair.decode.engine.reject(handle)


async def test_idle_engines_are_quiet(pair: Engines) -> None:
    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in all_processes(pair))

    before = used()
    await asyncio.sleep(2.0)
    assert (used() - before) / 2.0 < 0.25, "cores; a polling NIXL agent alone takes one"


async def test_stalled_reads_are_recomputed_and_their_blocks_come_back(pair: Engines) -> None:
    """Two reads stall: one of a whole prompt, and a read-ahead of a prompt's beginning."""
    prompt, other = prompt_of(700, seed=7), prompt_of(700, seed=23)
    handle, first = await pair.first("stalled", prompt, body())
    computed = await pair.prefill.prefill("p-stalled-ahead", other)
    part = msgspec.structs.replace(computed, block_ids=[computed.block_ids[0][:10]], num_tokens=10 * BLOCK)
    with pair.prefill.stopped():
        await pair.decode.engine.read_ahead(part, 0)
        stalled, ahead = await asyncio.gather(
            pair.go_on("stalled", prompt, body(), handle, first),
            pair.decode.generate("stalled-ahead", other, computed),
        )
        assert {"stalled", "stalled-ahead"} <= pair.decode.unread.keys()
        assert not await pair.decode.engine.all_blocks_free(), "the stalled reads' blocks are held"
        shorter = msgspec.structs.replace(handle, request_id="x")
        await pair.decode.generate("after them", prompt[1:], _shorter(shorter))
        assert pair.decode.unread["after them"] == "the read failed", "their peer is not asked again"
    await until(pair.decode.engine.all_blocks_free, 10)
    await reject_until_free(pair, computed)
    assert await pair.decode.generate("unstalled", prompt) == tokens_of(stalled)
    assert await pair.decode.generate("unstalled-ahead", other) == ahead
    await pair.all_free()
    before = pair.decode.bytes
    handle = await pair.prefill.prefill("p-again", prompt)
    assert await pair.decode.generate("remote-again", prompt, handle) == tokens_of(stalled)
    assert "remote-again" not in pair.decode.unread
    assert pair.decode.bytes > before, "the peer is asked again when it is back"


async def test_a_read_is_used_although_the_decode_engine_was_stopped_meanwhile(pair: Engines) -> None:
    prompt = prompt_of(40, seed=12)
    handle, failures = await pair.prefill.prefill("p-slept", prompt), pair.decode.failures
    with ExitStack() as stack:
        stack.enter_context(pair.prefill.stopped())
        await pair.decode.engine.generate("slept", prompt, body(), handle)
        await asyncio.sleep(0.5)  # the read has begun and gets no data
        with pair.decode.stopped():
            stack.close()
            await asyncio.sleep(2.0)
    slept = await pair.decode.end("slept")
    assert (pair.decode.failures, "slept" in pair.decode.unread) == (failures, False)
    await pair.all_free()
    assert await pair.decode.generate("awake", prompt) == slept


async def test_a_broken_connection_is_replaced(pair: Engines) -> None:
    """After a long silence UCX gives up an endpoint for good."""
    prompt = prompt_of(700, seed=15)
    handle = await pair.prefill.prefill("p-broken", prompt)
    await pair.decode.generate("unbroken", prompt, handle)
    handle = await pair.prefill.prefill("p-broken-again", prompt[1:])
    assert break_connections(pair) > 0
    broken = await pair.decode.generate("broken", prompt[1:], handle)
    await reject_until_free(pair, handle)
    before, failures = pair.decode.bytes, pair.decode.failures
    handle = await pair.prefill.prefill("p-mended", prompt[2:])
    mended = await pair.decode.generate("mended", prompt[2:], handle)
    await pair.all_free()
    assert pair.decode.bytes > before
    assert pair.decode.failures == failures
    assert await pair.prefill.generate("broken-there", prompt[1:]) == broken
    assert await pair.prefill.generate("mended-there", prompt[2:]) == mended


async def reject_until_free(pair: Engines, handle: KvHandle) -> None:
    """Reject repeatedly, because a rejection is lost if the connection has to be made anew."""
    async with asyncio.timeout(20):
        while not await pair.prefill.engine.all_blocks_free():
            await pair.decode.engine.reject(handle)
            await asyncio.sleep(0.2)


def break_connections(pair: Engines) -> int:
    """End all TCP connections between the two engines."""
    ports = {local[1] for process in pair.prefill.engine.processes for _, _, local, _ in _ends(process.pid)}
    ends = [end for process in pair.decode.engine.processes for end in _ends(process.pid)]
    found = [_duplicate(pid, fd) for pid, fd, _, remote in ends if remote and remote[1] in ports]
    broken = [connection for connection in found if connection is not None]
    for connection in broken:
        with connection:
            connection.shutdown(socket.SHUT_RDWR)
    return len(broken)


async def test_ctrl_c_and_a_closed_terminal_do_not_reach_the_engine(pair: Engines) -> None:
    """A terminal sends both to its whole foreground group."""
    for number in (signal.SIGINT, signal.SIGHUP):
        for process in pair.decode.engine.processes:
            process.send_signal(number)
    assert len(await pair.decode.generate("undisturbed", prompt_of(40, seed=13))) == 8


async def test_a_stalled_core_is_noticed_and_a_hung_one_is_dead(
    pair: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the hang, the core stalls once and continues."""
    for name, seconds in {"STALLS_AFTER": 1.0, "HANGS_AFTER": 5.0, "PROBE_INTERVAL": 0.1}.items():
        monkeypatch.setattr(engine_checks, name, seconds)
    watch, said = engine_checks.EngineWatch(pair.decode.engine), list[bool]()
    watch.on_change = lambda: said.append(watch.stalled)
    watching = asyncio.create_task(watch.run())
    await pair.decode.generate("watched", prompt_of(3000, seed=14))
    await asyncio.sleep(1.5)
    assert not said
    with pair.decode.stopped():
        await until(lambda: said == [True])
    await until(lambda: said == [True, False])
    with pair.decode.stopped(), pytest.raises(EngineDead, match="hangs"):
        await asyncio.wait_for(watching, 20)


async def test_a_killed_engine_raises_and_leaves_nothing_behind(pair: Engines) -> None:
    processes = list(pair.decode.engine.processes)
    meeting = f"{os.environ['VLLM_RPC_BASE_PATH']}/vllm_dist_{os.getpid()}_decode-0-test_*"
    assert len(glob(meeting)) == 1
    pair.decode.kill()
    with pytest.raises(EngineDead) as death:
        await asyncio.wait_for(_until_dead(pair.decode), 20)
    assert death.value.killed
    await pair.decode.engine.__aexit__(None, None, None)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    assert glob(meeting) == []
    for process in pair.prefill.engine.processes:
        process.send_signal(signal.SIGABRT)
    with pytest.raises(EngineDead) as death:
        await asyncio.wait_for(pair.prefill.engine.watch(), 20)
    assert death.value.crashed


async def _until_dead(driven: Driven) -> None:
    while True:
        await driven.engine.generate(f"x{time.monotonic()}", prompt_of(10), body(), None)
        await asyncio.sleep(0.1)
