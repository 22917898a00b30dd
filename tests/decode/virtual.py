"""A graph in virtual time. Its engines take as long as simulated engines; its estimates and decisions are real.

`python -m tests.decode.virtual` prints TTFTs and gaps of both policies under several loads within seconds.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

from pdserve.config.schema import DecodeSection
from pdserve.contract.messages import KvHandle, PrefillDone, PrefillLoad, QueueState
from pdserve.contract.slo import SloTargets as Pacing
from pdserve.decode.policy.decision import Decision, decide
from pdserve.decode.remote.publisher import POLL_INTERVAL, PromptPublisher
from pdserve.decode.scheduling.prefill_times import Estimator
from pdserve.engine.sim.model import SimModel
from pdserve.kv.prefill_chunk import MAX_SHORT_STEPS
from pdserve.plan.plan import DECODE_CHUNK
from pdserve.prefill.pull_policy import FEW_PROMPTS, STEPS_AHEAD
from pdserve.process.learned import PrefillSpeed
from pdserve.queue.depth import QueueDepth
from pdserve.queue.prompt_queue import PromptQueue
from pdserve.queue.reports import StateReports
from tests.frontend.sequence.test_pacing import left, longest

SPEED = SimModel(prefill_rate=26_000, step_seconds=0.0025, sequence_seconds=0.00015)
"""About the speed of the demo model on one core."""
TRANSFER, PUBLISH = 0.012, 0.002
BLOCK = 32
PULL_BELOW = 2048
"""A prefill worker with at least this many prompt tokens pulls no prompt. If it has `FEW_PROMPTS` prompts or more, the
bound is `STEPS_AHEAD` times as high."""
THRESHOLD = DecodeSection(remote_prefill=True, policy="threshold", max_local_prefill_length=64)
LOCAL = Decision("local", "")
ALL_LOCAL = DecodeSection(remote_prefill=False)
ALL_REMOTE = DecodeSection(remote_prefill=True, conditional_disagg=False)
ADAPTIVE = DecodeSection(remote_prefill=True, policy="adaptive")


HANDLE = KvHandle("", "", "", 1, [], 0, BLOCK)


@dataclass(frozen=True)
class Promised:
    ttft: float
    gap: float


NO_PROMISE = Promised(math.inf, math.inf)


@dataclass(eq=False)
class VirtualRequest:
    """The fields of a request that the estimator reads, and the times of its tokens."""

    prompt: int
    answer_tokens: int
    begun: float
    decode: "VirtualDecode"
    client: str = ""
    decision: Decision = LOCAL
    computed: int = 0
    local_tokens: int = 0
    remote_tokens: int = 0
    prefiller: str = ""
    preferred: str = ""
    asked: float = 0.0
    has_first_step: bool = False
    since: float = 0.0
    pulled: float = 0.0
    outcome: Any = None
    times: list[float] = field(default_factory=list)
    published: bool = False
    sequence: int = 0
    missed_slo: bool = False

    @property
    def submit(self) -> Any:
        return SimpleNamespace(prompt=range(self.prompt), client=self.client)

    @property
    def due(self) -> float:
        return self.begun + self.decode.graph.promised.ttft

    @property
    def gap(self) -> float:
        return self.decode.graph.promised.gap

    def came(self) -> None:
        """Record a token."""
        now, last = self.decode.graph.now, self.times[-1:]
        self.missed_slo |= now - last[0] > self.gap if last else now > self.due
        self.times.append(now)

    def keeps(self, promised: Promised) -> bool:
        """Whether the tokens keep the promise when they leave the frontend. With an SLO, it paces them."""
        slo, times = self.decode.graph.promised, self.times
        if slo.gap < math.inf:
            times = left(Pacing(slo.ttft, slo.gap), times, started=self.begun)
        return times[0] - self.begun <= promised.ttft and longest(times) <= promised.gap

    @property
    def awaits_answer(self) -> bool:
        return self.remote_tokens > 0

    @property
    def turn(self) -> Any:
        """Stands for a future; `set_result` publishes the prompt."""

        def publish(_: None) -> None:
            self.published = True
            self.decode.graph.after(PUBLISH, partial(self.decode.graph.publish, self))

        return SimpleNamespace(set_result=publish)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.begun

    @property
    def longest_gap(self) -> float:
        return longest(self.times)


class VirtualEngine:
    """Its steps have up to 2,048 tokens: first those of running streams, then `chunk` tokens of each prompt, FIFO. A
    prompt without other requests fills the step. In most steps after a KV transfer, a prompt gets `BLOCK` tokens."""

    def __init__(self, graph: "VirtualGraph", chunk: int = 2048) -> None:
        self.graph, self.usual, self.slow = graph, chunk, 1.0
        self.prompt_tokens = 0
        """Prompt tokens of the last step."""
        self.requests: list[VirtualRequest] = []
        self._busy, self._with_kv = False, 0

    def add(self, request: VirtualRequest) -> None:
        self.requests.append(request)
        self.go_on()

    def go_on(self) -> None:
        if self._busy or not self.requests:
            return
        left, share = 2048, []
        chunk = max(BLOCK, self.chunk) if len(self.requests) > 1 else left
        come = any(each.computed == each.prompt - 1 for each in self.requests)  # transferred KV
        self._with_kv = self._with_kv + 1 if come else 0
        if self._with_kv % (MAX_SHORT_STEPS + 1):
            chunk = BLOCK
        for request in sorted(self.requests, key=lambda each: each.computed < each.prompt):
            if count := min(left, chunk, max(1, request.prompt - request.computed)):
                share.append((request, count))
                left -= count
        self.prompt_tokens = sum(count for each, count in share if each.computed < each.prompt - 1)
        chunks = [(each.computed, count) for each, count in share if each.computed < each.prompt]
        seconds = SPEED.step_time(len(share) - len(chunks), 0, chunks) * self.graph.noise() * self.slow
        seconds *= self.graph.sharing
        self._busy = True
        self.graph.after(seconds, lambda: self._end(share))

    def _end(self, share: list[tuple[VirtualRequest, int]]) -> None:
        for request, count in share:
            request.computed = min(request.prompt, request.computed + count)
            if request.computed == request.prompt:
                self.token(request)
        self._busy = False
        self.ended()
        self.go_on()

    @property
    def chunk(self) -> int:
        return self.usual

    def ended(self) -> None:
        """Called at the end of a step."""

    def token(self, request: VirtualRequest) -> None:
        raise NotImplementedError


class KnownQueue:
    """What a decode worker knows of the queue and the prefill workers."""

    connected = True

    def __init__(self, graph: "VirtualGraph") -> None:
        self.graph, self.known = graph, QueueDepth()
        self.loads: dict[str, tuple[PrefillLoad, float]] = {}
        self.own_pulls: dict[str, int] = {}

    @property
    def stored(self) -> int:
        return self.known.value

    @property
    def depth(self) -> int:
        return self.stored + sum(worker.turns._held.regular for worker in self.graph.decode)

    def hold(self, requests: int) -> None:
        """Nothing to report: `depth` asks the decode workers."""

    def learn(self, state: QueueState) -> None:
        self.known = self.known.reported(state)
        self.loads[state.worker] = state.load, self.graph.now


class VirtualDecode(VirtualEngine):
    def __init__(self, graph: "VirtualGraph", chunk: int) -> None:
        super().__init__(graph, chunk)
        self.waiting: PromptQueue[VirtualRequest] = PromptQueue()
        self.live: list[VirtualRequest] = []
        self.workers = [worker.id for worker in graph.prefill]
        available = [SimpleNamespace(id=name) for name in self.workers]
        workers = SimpleNamespace(available=lambda: available)
        clock = lambda: graph.now  # noqa: E731
        self.queue = queue = KnownQueue(graph)
        self.estimator = Estimator(self, queue, workers, clock, chunk, lambda: BLOCK)  # type: ignore[arg-type]
        self.turns = PromptPublisher(queue, workers, clock)  # type: ignore[arg-type]

    @property
    def chunk(self) -> int:
        prompts = sum(each.local_tokens > 0 for each in self.requests)
        return self.estimator.chunk // max(1, prompts)

    def clients(self) -> list[VirtualRequest]:
        return self.live

    def __iter__(self) -> Iterator[VirtualRequest]:
        return iter(self.live)

    def submit(self, request: VirtualRequest) -> None:
        self.live.append(request)
        estimates = self.estimator.of(request, request.prompt, request.prompt, self.workers)  # type: ignore[arg-type]
        args = request.prompt, 0, self.queue.depth, len(self.graph.prefill), True, self.graph.settings
        request.decision = decide(*args, estimates=estimates)
        if request.decision.mode == "local":
            request.local_tokens = request.prompt
            needs = request.prompt * self.estimator.local_token_seconds
            self.waiting.add(request.client, request, request.due, needs)
            self._start()
        else:
            request.remote_tokens = request.prompt
            if self.graph.turns:
                self.turns.add(request)  # type: ignore[arg-type]
            else:
                request.turn.set_result(None)

    def _start(self) -> None:
        while first := self.waiting.first(self.graph.now):
            chunk = self.estimator.chunk
            held = sum(min(chunk, each.local_tokens) for each in self.requests)
            if held and held + first.local_tokens > chunk:
                return
            request = self.waiting.pop(self.graph.now)
            request.since = self.graph.now
            self.add(request)

    def answered(self, request: VirtualRequest) -> None:
        request.remote_tokens, request.since = 0, self.graph.now
        request.came()
        self.turns.remove(request)  # type: ignore[arg-type]
        self.graph.after(TRANSFER, lambda: self.add(request))

    def ended(self) -> None:
        self.estimator.stepped(self.graph.now, self.prompt_tokens)

    def token(self, request: VirtualRequest) -> None:
        request.came()
        if not request.has_first_step:
            self.estimator.first_token(request, self.graph.now)  # type: ignore[arg-type]
            request.has_first_step, request.local_tokens = True, 0
            self.graph.after(0.002, self._start)
        if len(request.times) == request.answer_tokens:
            self.requests.remove(request)
            self.live.remove(request)
            self.graph.ended(request)


class VirtualPrefill(VirtualEngine):
    def __init__(self, graph: "VirtualGraph", number: int) -> None:
        super().__init__(graph)
        self.id = f"prefill-{number}"
        self._speed = PrefillSpeed()
        self._reports, self._sequence, self._pending = StateReports(), 0, 0
        self._reporting = False

    @property
    def _below(self) -> int:
        return PULL_BELOW * (STEPS_AHEAD if len(self.requests) >= FEW_PROMPTS else 1)

    def pull(self) -> None:
        while self.graph.queue and sum(each.prompt for each in self.requests) < self._below:
            self._take(self.graph.queue.pop(0))

    def _take(self, request: VirtualRequest) -> None:
        request.prefiller, request.pulled = self.id, self.graph.now
        if request.sequence:  # otherwise, it was sent to this worker past the queue
            self._sequence, self._pending = request.sequence, len(self.graph.queue)
            request.decode.queue.own_pulls[self.id] = self._sequence
        self._reports.pulled(str(id(request.decode)), self.graph.now)
        self.requests.append(request)
        for decode in self.graph.decode if self.graph.broadcasts else [request.decode]:
            decode.queue.learn(self._state())
        self.graph.after(PUBLISH, request.decode.turns.publish_next)  # `PrefillStarted`
        if not self._reporting:
            self._reporting = True
            self.graph.after(self._reports.interval(self.graph.now), self._report)
        self.go_on()

    @property
    def _tokens(self) -> int:
        return sum(each.prompt for each in self.requests)

    def _state(self) -> QueueState:
        load = PrefillLoad(self._tokens, self._speed.token_seconds.value or 0.0)
        return QueueState(self._sequence, self._pending, self.id, load)

    def _report(self) -> None:
        """Broadcast the queue's state and the load when due, as `JetStreamQueue` does."""
        state, now = self._state(), self.graph.now
        if report := self._reports.next(state, now):
            self.graph.reports += 1
            for decode in self.graph.decode:
                if decode.queue.own_pulls.get(self.id) != report.delivered_seq:
                    decode.queue.learn(report)
                self.graph.after(POLL_INTERVAL, decode.turns.publish_next)
            for worker in self.graph.prefill:
                worker._reports.reported(report, now)
        self._reporting = False

    def token(self, request: VirtualRequest) -> None:
        self.requests.remove(request)
        self._speed.done(request.prompt, request.pulled, self.graph.now)
        done = PrefillDone("", HANDLE, self.graph.now - request.pulled)
        request.outcome = done
        request.computed = request.prompt - 1  # as vLLM: the decode engine computes the last token
        request.decode.answered(request)
        self.pull()


class VirtualGraph:
    def __init__(
        self,
        settings: DecodeSection,
        *,
        prefill: int = 1,
        decode: int = 1,
        seed: int = 1,
        turns: bool = True,
        promised: Promised = NO_PROMISE,
        slow: tuple[float, float] = (1.0, 1.0),
        one_core: bool = False,
        broadcasts: bool = False,
    ) -> None:
        """With `broadcasts` each pull is reported to all decode workers. Without `turns` each prompt is published at
        once. `slow`: factors of the step times of decode and prefill workers. `one_core`: all share one core."""
        self.settings, self.random, self.now = settings, Random(seed), 0.0
        self.queue: list[VirtualRequest] = []
        self.broadcasts, self.reports, self.last = broadcasts, 0, 0
        self.turns, self.promised, self.one_core = turns, promised, one_core
        self.prefill = [VirtualPrefill(self, number) for number in range(prefill)]
        self.decode = [VirtualDecode(self, DECODE_CHUNK) for _ in range(decode)]
        for decoding in self.decode:
            decoding.slow = slow[0]
        for prefilling in self.prefill:
            prefilling.slow = slow[1]
        self.done: list[VirtualRequest] = []
        self.ended: Callable[[VirtualRequest], None] = self.done.append
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    @property
    def sharing(self) -> int:
        """Number of engines that share a core now."""
        return sum(bool(each.requests) for each in (*self.prefill, *self.decode)) if self.one_core else 1

    def noise(self) -> float:
        return self.random.uniform(0.85, 1.25)

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def publish(self, request: VirtualRequest) -> None:
        self.last = request.sequence = self.last + 1
        request.decode.queue.known = request.decode.queue.known.published(self.last)
        self.queue.append(request)
        for worker in self.random.sample(self.prefill, len(self.prefill)):
            worker.pull()

    def ask(self, prompt: int = 1300, tokens: int = 64, client: str = "") -> None:
        worker = self.decode[next(self._numbers) % len(self.decode)]
        worker.submit(VirtualRequest(prompt, tokens, self.now, worker, client))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until

    def closed(self, clients: int, seconds: float) -> list[VirtualRequest]:
        """Run a closed loop: each of `clients` sends its next request when it has its response."""

        def again(request: VirtualRequest) -> None:
            self.done.append(request)
            self.after(self.random.uniform(0.002, 0.012), self.ask)

        self.ended = again
        for number in range(clients):
            self.after(0.003 * number, self.ask)
        self.run(seconds)
        return self.done

    def poisson(
        self, rate: float, seconds: float, prompts: tuple[int, ...] = (1300,)
    ) -> list[VirtualRequest]:
        """Run Poisson arrivals at `rate` requests per second."""
        at = self.random.expovariate(rate)
        while at < seconds:
            self.after(at, lambda: self.ask(self.random.choice(prompts)))
            at += self.random.expovariate(rate)
        self.run(seconds + 30)
        return self.done


@dataclass(frozen=True)
class Figures:
    """Percentiles in milliseconds. `of` counts requests that began from `begin` to `end`, in seconds."""

    ttft50: float
    ttft99: float
    itl99: float
    gap99: float
    local: float
    """Share of the prompts that were prefilled locally."""

    @classmethod
    def of(cls, requests: list[VirtualRequest], begin: float = 3.0, end: float = 1e9) -> "Figures":
        found = [request for request in requests if begin <= request.begun < end]
        ttfts = sorted(1000 * each.ttft for each in found)
        gaps = sorted(1000 * each.longest_gap for each in found)
        itls = sorted(1000 * (b - a) for each in found for a, b in itertools.pairwise(each.times))
        local = sum(each.decision.mode == "local" for each in found) / len(found)
        return cls(
            ttfts[len(ttfts) // 2],
            ttfts[int(0.99 * len(ttfts))],
            itls[int(0.99 * len(itls))],
            gaps[int(0.99 * len(gaps))],
            local,
        )

    def __str__(self) -> str:
        return (
            f"TTFT p50 {self.ttft50:5.0f}, p99 {self.ttft99:5.0f}; ITL p99 {self.itl99:4.0f}; longest gap p99 "
            f"{self.gap99:4.0f} ms; {self.local:4.0%} local"
        )


LOADS: dict[str, Callable[[VirtualGraph], list[VirtualRequest]]] = {
    "1 client": lambda graph: graph.closed(1, 30),
    "8 clients": lambda graph: graph.closed(8, 30),
    "32 clients": lambda graph: graph.closed(32, 30),
    "5 requests/s": lambda graph: graph.poisson(5, 60),
    "10 requests/s": lambda graph: graph.poisson(10, 60),
    "18 requests/s": lambda graph: graph.poisson(18, 60),
    "22 requests/s": lambda graph: graph.poisson(22, 60),
    "20/s, 50 to 3,000 tokens": lambda graph: graph.poisson(20, 60, (50, 100, 200, 1300, 3000)),
}

if __name__ == "__main__":
    for load, drive in LOADS.items():
        for settings in (THRESHOLD, ADAPTIVE):
            print(f"{load:25}  {settings.policy:10} {Figures.of(drive(VirtualGraph(settings)))}")
