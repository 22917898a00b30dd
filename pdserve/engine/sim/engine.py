"""The simulated engine: continuous batching over a real block pool, with sleeps where the GPU would work.

It is simpler than vLLM in two ways: a request reserves the blocks of all its tokens when it is admitted, so that no
request is ever preempted, and it always runs to max_tokens. Stop tokens are ignored."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from pdserve.config.engine_args.installed import VLLM_VERSION
from pdserve.contract.messages import KvHandle
from pdserve.contract.prefixes import PrefixKey
from pdserve.engine.base import Engine, EngineFacts, EngineUsage, Output, Read, Step, Transfers
from pdserve.engine.fingerprint import Fingerprint
from pdserve.engine.sim import wire
from pdserve.engine.sim.blocks import BlockPool
from pdserve.engine.sim.kv_server import KvServer, Unreachable, ask
from pdserve.engine.sim.model import Faults, seed_of, sim_model
from pdserve.engine.sim.sim_lora import SimAdapters
from pdserve.engine.sim.wire import SimRequest
from pdserve.engine.spec import EngineSpec
from pdserve.kv.handles import check_handle, source
from pdserve.kv.read_ahead.blocks import MIN_PIECE_BYTES
from pdserve.runtime.tasks import TaskOwner
from pdserve.util.errors import EngineDead, ProtocolError, Unavailable
from pdserve.util.lru import LruDict
from pdserve.util.ticks import tick

_MAX_CATCH_UP = 0.005
"""Maximum of seconds by which a step is shortened after a late one, because timers are coarse."""


class SimEngine(SimAdapters, Engine):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec.engine_args)
        self.faults = Faults()
        self._spec = spec
        self._model = model = sim_model(spec.engine_args)
        self._chunk, self._steps_with_kv = model.prompt_chunk, 0
        self._pool = BlockPool(model.kv_blocks, model.block_size)
        self.prefixes = self._pool.prefixes
        self._kv_server = KvServer(spec.instance, spec.host, self._pool.contents, self._release, self.faults)
        self._waiting: deque[SimRequest] = deque()
        self._pulling: dict[SimRequest, asyncio.Task[None]] = {}
        self._running: list[SimRequest] = []
        self._tasks = TaskOwner()
        self._ahead: dict[tuple[str, str], int] = {}
        """By `handles.source`: number of blocks of a running prefill that were read."""
        self._held: dict[str, tuple[list[int], asyncio.TimerHandle]] = {}
        self._seen: LruDict[None] = LruDict(100_000)
        self._work = asyncio.Event()
        self._stepping = asyncio.Lock()
        self._computed, self._step = 0.0, (0.0, 0.0)
        """Seconds of the steps that have ended; begin and length of the current step."""
        self._due = 0.0
        """When the last step should have ended; 0 while there is no step to compute."""
        self._steps: asyncio.Queue[Step] = asyncio.Queue()

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        model = self._model
        loading = Fingerprint(self._spec.model, self._spec.engine_args, VLLM_VERSION)
        await loading.before()
        if model.load_seconds:
            await asyncio.to_thread(time.sleep, model.load_seconds)
        fingerprint = await loading.after()
        self._pool.weights = int(fingerprint, 16)
        self.facts = EngineFacts(
            kv_blocks=model.kv_blocks,
            block_size=model.block_size,
            max_model_len=model.max_model_len,
            max_num_seqs=model.max_num_seqs,
            max_batched_tokens=model.max_batched_tokens,
            max_concurrency=model.kv_blocks / self._pool.needed(model.max_model_len),
            vllm_version=VLLM_VERSION,
            supported_tasks=["generate"],
            fingerprint=fingerprint,
        )
        if model.stop_signal:
            asyncio.get_running_loop().add_signal_handler(model.stop_signal, self.faults.toggle_hang)
        async with self._kv_server:
            try:
                async with self._tasks:
                    self._tasks.start(self._run(), "sim engine", lambda _: self.die())
                    yield
            finally:
                for _, timer in self._held.values():
                    timer.cancel()

    # the contract

    async def generate(
        self,
        request_id: str,
        prompt: list[int],
        body: list[bytes],
        kv: KvHandle | None,
        after: Sequence[int] = (),
    ) -> None:
        asked = self.read(body)
        if kv is not None:
            check_handle(kv, len(prompt), self._model.block_size, self.fingerprint_of(asked))
        max_tokens = asked.max_tokens(self._model.max_model_len - len(prompt)) - len(after)
        if self.faults.no_grammars and asked.sampling.structured_outputs is not None:
            self._refuse_reuse(request_id)
            self._steps.put_nowait(Step([wire.refused(request_id)]))
            return
        tokens = [*prompt, *after]
        whole = self._pool.whole(tokens, asked.root, asked.images)
        self._add(SimRequest(request_id, tokens, max_tokens, asked, whole, kv=kv))

    async def prefill(self, request_id: str, prompt: list[int], body: list[bytes]) -> None:
        asked = self.read(body)
        whole = self._pool.whole(prompt, asked.root, asked.images)
        self._add(SimRequest(request_id, prompt, 1, asked, whole, keep=True))

    def first_output(
        self, request_id: str, prompt: list[int], body: list[bytes], packed: list[bytes]
    ) -> Output | None:
        last = wire.read_request(body).max_tokens(self._model.max_model_len - len(prompt)) == 1
        raw = wire.read_output(packed, request_id, last)
        return Output(request_id, raw.new_token_ids, last, raw=raw) if raw else None

    async def read_ahead(self, kv: KvHandle, skip: int) -> None:
        self._check_alive()
        self._ahead[source(kv)] = len(kv.block_ids[0])

    async def drop_ahead(self, kv: KvHandle) -> None:
        self._check_alive()
        self._ahead.pop(source(kv), None)

    async def reject(self, kv: KvHandle) -> None:
        self._check_alive()
        self._free_remote(kv)

    async def limit_chunk(self, tokens: int) -> None:
        self._check_alive()
        self._chunk = tokens

    async def cancel(self, request_ids: list[str]) -> None:
        self._check_alive()
        for request in self.requests:
            if request.request_id in request_ids:
                self._drop(request)

    async def step(self) -> Step:
        self._check_alive()
        step = await self._steps.get()
        self._check_alive()
        return step

    def pack(self, outputs: list[Output]) -> list[bytes]:
        return wire.write_outputs([output.raw for output in outputs])

    def plain_body(self, max_tokens: int) -> list[bytes]:
        return wire.write_request(wire.Sampling(max_tokens))

    def prefix_key(self, body: list[bytes]) -> PrefixKey | None:
        request = wire.read_request(body)
        return None if request.sampling.prompt_logprobs is not None else request.prefix_key

    @property
    def usage(self) -> EngineUsage:
        used, queued = self._pool.total - self._pool.free, len(self._waiting)
        return EngineUsage(len(self._running), queued + len(self._pulling), queued, used / self._pool.total)

    async def all_blocks_free(self) -> bool:
        self._check_alive()
        return not self._ahead and self._pool.forget()

    async def watch(self) -> None:
        while True:
            self._check_alive()
            await tick(0.5)

    async def probe(self) -> None:
        async with self._stepping:
            await self.faults.going.wait()
        self._check_alive()

    async def reach(self) -> None:
        if self.faults.deaf:
            raise TimeoutError("the simulated side channel does not answer")

    def cpu_seconds(self) -> float:
        began, takes = self._step
        return self._computed + min(time.monotonic() - began, takes)

    def die(self, *, killed: bool = False) -> None:
        """Simulate that the engine's processes crashed, or were `killed` from outside; a waiting `step` raises."""
        self.faults.dead, self.faults.killed = True, killed
        self._steps.put_nowait(Step([]))

    # admission

    def _check_alive(self) -> None:
        if self.faults.dead:
            raise EngineDead("the simulated engine died on command", **self.faults.cause)

    def _refuse_reuse(self, request_id: str) -> None:
        if request_id in self._seen:
            raise ProtocolError(f"request {request_id} was given to this engine before")
        self._seen[request_id] = None

    def _add(self, request: SimRequest) -> None:
        self._check_alive()
        if not 0 < (prompt := len(request.prompt)) < self._model.max_model_len:
            raise ProtocolError(f"a prompt of {prompt} tokens does not fit this engine")
        if (new := request.max_tokens) < 1 or self._pool.needed(prompt + new) > self._pool.total:
            raise ProtocolError(f"cannot generate {new} tokens after {prompt} in this KV cache")
        self._refuse_reuse(request.request_id)
        self._waiting.append(request)
        self._work.set()

    def _admit(self) -> None:
        """Admit waiting requests in order of arrival. As in vLLM, stop when the next step has no tokens left, so that a
        later prompt can use the prefixes that earlier prompts compute."""
        model, taken = self._model, sum(max(1, len(each.prompt) - each.computed) for each in self._running)
        left = model.max_batched_tokens - taken
        while left > 0 and self._waiting and len(self._running) + len(self._pulling) < model.max_num_seqs:
            request = self._waiting[0]
            tokens = len(request.prompt)
            if (found := self._pool.take(tokens, request.whole, tokens + request.max_tokens)) is None:
                return
            self._waiting.popleft()
            request.blocks, hit = found
            request.computed = request.cached = hit * self._model.block_size
            if request.kv is None:
                left -= tokens - request.computed
                request.begun = time.monotonic()
                self._running.append(request)
            else:
                work = self._pull(request, request.kv)
                self._pulling[request] = self._tasks.start(work, "sim KV pull", lambda _: self.die())

    def _drop(self, request: SimRequest) -> None:
        request.gone = True
        for requests in (self._waiting, self._running):
            if request in requests:
                requests.remove(request)
        if task := self._pulling.pop(request, None):
            task.cancel()
        if request.kv is not None and not request.pulled:
            self._free_remote(request.kv)
        self._pool.give(request.blocks)
        self._work.set()

    # steps

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._admit()
            if not self._running:
                self._work.clear()
                self._due = 0.0
                continue
            share = self._schedule()
            if any(
                self.faults.kills(request.prompt, request.pulled, self._model.fatal_token)
                for request, _ in share
                if request.prefilling
            ):
                self.die()
                return
            await self._compute(self._model.step_time(*wire.load_of(share)) * self.faults.slow)
            prompts = sum(count for request, count in share if request.prefilling)
            if outputs := [output for request, count in share if (output := self._advance(request, count))]:
                self._steps.put_nowait(Step(outputs, ended=time.monotonic(), prompt_tokens=prompts))

    async def _compute(self, seconds: float) -> None:
        async with self._stepping:
            now = time.monotonic()
            begin = max(self._due, now - _MAX_CATCH_UP) if self._due else now
            self._step, self._due = (begin, seconds), begin + seconds
            await asyncio.sleep(self._due - now)
            self._computed, self._step = self._computed + seconds, (0.0, 0.0)
            await self.faults.going.wait()

    def _schedule(self) -> list[tuple[SimRequest, int]]:
        """Tokens that each request computes in the next step, within the budget: first decoding requests, then prompts
        in chunks, by arrival."""
        budget = self._model.max_batched_tokens
        pulled = [request.pulled for request in self._running if request.prefilling]
        self._steps_with_kv = self._steps_with_kv + 1 if any(pulled) else 0
        is_only_one = len(self._running) + len(self._waiting) == 1
        chunk = budget if is_only_one else self._model.chunk(self._chunk, len(pulled), self._steps_with_kv)
        share: list[tuple[SimRequest, int]] = []
        for request in sorted(self._running, key=lambda request: request.prefilling):
            count = min(len(request.prompt) - request.computed, budget, chunk) if request.prefilling else 1
            if count > 0:
                share.append((request, count))
                budget -= count
        return share

    def _advance(self, request: SimRequest, count: int) -> Output | None:
        if request.gone:
            return None
        if request.prefilling:
            request.computed += count
            self._pool.fill(request.blocks, request.whole, request.computed)
            if request.prefilling:
                self._report_complete(request)
                return None
        request.tokens.append(self._model.next_token(request.seed, request.salt))
        request.seed = seed_of(request.tokens[-1:], request.seed)
        handle = self._finish(request) if request.finished else None
        return request.output(handle, self._model)

    def _finish(self, request: SimRequest) -> KvHandle | None:
        self._running.remove(request)
        if not request.keep:
            computed = request.prompt + request.tokens[:-1]
            whole = self._pool.whole(computed, request.asked.root, request.asked.images)
            self._pool.fill(request.blocks, whole, len(computed))
            self._pool.give(request.blocks)
            return None
        used = self._pool.needed(len(request.prompt))
        self._pool.give(request.blocks[used:])
        timer = asyncio.get_running_loop().call_later(self._model.lease, self._release, request.request_id)
        self._held[request.request_id] = (request.blocks[:used], timer)
        return self._handle(request, used, len(request.prompt))

    def _report_complete(self, request: SimRequest) -> None:
        blocks = request.computed // self._model.block_size
        fresh = (blocks - request.named) * self._model.block_size * self._model.bytes_per_token
        if request.keep and fresh >= MIN_PIECE_BYTES:
            request.named = blocks
            kv = self._handle(request, blocks, blocks * self._model.block_size)
            self._steps.put_nowait(Step([], complete=[kv]))

    def _handle(self, request: SimRequest, blocks: int, tokens: int) -> KvHandle:
        return KvHandle(
            engine_id=self._spec.instance,
            request_id=request.request_id,
            host=self._spec.host,
            port=self._kv_server.port,
            block_ids=[request.blocks[:blocks]],
            num_tokens=tokens,
            block_size=self._model.block_size,
            fingerprint=self.fingerprint_of(request.asked),
            lease=self._model.lease,
            extra={"remote_prefill_cached_tokens": request.cached},
        )

    # transfers

    async def _pull(self, request: SimRequest, kv: KvHandle) -> None:
        model, began = self._model, time.monotonic()
        first = request.computed // model.block_size
        wanted = kv.block_ids[0][first:]
        read_ahead = max(0, self._ahead.pop(source(kv), 0) - first)
        size = (len(wanted) - read_ahead) * model.block_size * model.bytes_per_token
        try:
            await ask(kv, wanted, model.transfer_timeout)
            await asyncio.sleep(model.transfer_seconds + size / model.bandwidth)
            answer = await ask(kv, wanted, model.transfer_timeout, done=True)
            if not answer.held:
                raise Unavailable(f"{kv.engine_id} no longer held the KV")
        except Unavailable as error:
            unreachable = [kv.engine_id] if isinstance(error, Unreachable) else []
            unread = {request.request_id: str(error)}
            self._steps.put_nowait(Step([], Transfers(failures=1), unread, unreachable=unreachable))
            request.unread = True
        else:
            self._receive(request, kv, first, answer.contents)
            read = Read(kv.engine_id, time.monotonic() - began, size)
            self._steps.put_nowait(Step([], Transfers([read])))
        del self._pulling[request]
        request.begun = time.monotonic()
        self._running.append(request)
        self._work.set()

    def _receive(self, request: SimRequest, kv: KvHandle, first: int, contents: list[int]) -> None:
        """Record that the KV was read. As in vLLM, this engine computes the last token of the prompt."""
        before, request.computed = request.computed, len(request.prompt) - 1
        request.pulled = request.computed - before
        expected = request.whole[first : kv.num_tokens // self._model.block_size]
        request.salt += int(contents[: len(expected)] != expected)

    def _free_remote(self, kv: KvHandle) -> None:
        self._ahead.pop(source(kv), None)
        self._tasks.start(self._send_done(kv), "sim KV release")

    async def _send_done(self, kv: KvHandle) -> None:
        with suppress(Unavailable):  # the prefill engine has ended, or frees the blocks when their lease ends
            await ask(kv, [], self._model.transfer_timeout, done=True)

    def _release(self, request_id: str) -> bool:
        """Free a prefill's blocks; return whether they were held until now."""
        if request_id not in self._held:
            return False
        blocks, timer = self._held.pop(request_id)
        timer.cancel()
        self._pool.give(blocks)
        self._steps.put_nowait(Step([], released=[request_id]))
        self._work.set()
        return True
