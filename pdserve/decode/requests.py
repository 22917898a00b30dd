"""The state of each request at a decode worker, from its arrival to its last output."""

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from pdserve.contract.messages import KvHandle, Placed, PrefillDone, PrefillFailed, Promise, Submit
from pdserve.contract.prefixes import PromptNames
from pdserve.decode.hops import RequestHops
from pdserve.decode.policy.cost import PrefixChoice
from pdserve.decode.policy.decision import Decision
from pdserve.kv.handles import source
from pdserve.observe.tracing import Attributes, Tracer
from pdserve.util.lru import LruDict
from pdserve.util.ticks import tick, until_tick

IDLE_INTERVAL = 2.0
"""Maximum of seconds that `pause` waits for a request."""
_REMEMBERED = 50_000
"""Number of newest request ids that are not accepted again."""

Outcome = PrefillDone | PrefillFailed | str
"""Outcome of a remote prefill: the answer, or why none will come (`CANCELLED`, `OWN`, or a label of the failure
metric)."""

CANCELLED = "cancelled"
OWN = "own"
"""Role `both`: outcome when this worker took its own request back from the queue. The decision's reason then, and when
this worker is idle."""
STAND_IN = "stand-in"
"""The decision's reason at a stand-in, which prefills locally."""


class Phase(Enum):
    WAITING = "waiting"
    """Not in the engine yet: undecided, queued for prefill, or answered."""
    RUNNING = "running"
    """In the engine."""


@dataclass(eq=False)
class DecodeRequest:
    """Times are monotonic seconds."""

    frontend: str
    submit: Submit
    phase: Phase = Phase.WAITING
    cancelled: bool = False
    """The task of a WAITING request ends when it sees this, and sends nothing."""
    answer: asyncio.Future[Outcome] | None = None
    """Outcome of the remote prefill; None until it is asked for."""
    asked: float = 0.0
    """When a remote prefill was asked for."""
    turn: asyncio.Future[None] | None = None
    """Done when the prompt may be published (`decode/remote/publisher.py`)."""
    published: bool = False
    """Whether the prompt was published to the prefill queue, or sent to one prefill worker."""
    remote_tokens: int = 0
    """Prompt tokens that a prefill worker computes or will compute; 0 after its answer."""
    local_tokens: int = 0
    """Prompt tokens that this engine computes or will compute; 0 after the first token."""
    prefiller: str = ""
    """Instance id of the prefill worker that has begun the prompt. A warm-up has it from its start."""
    losses: int = 0
    """`queue.losses` when the prompt was sent."""
    engines_died: int = 0
    """Engines in a row that died while they computed the request's next token; above 0: a suspect (`quarantine.py`)."""
    prefix: PrefixChoice | None = None
    """The prefill worker to which the prompt is sent because of its prefix cache; None: any worker may compute it."""
    begun: asyncio.Future[bool] | None = None
    """With `prefix`: whether that worker has begun the prompt. False: it will not."""
    names: PromptNames | None = None
    """Names of the prompt's blocks. None before the decision, without remote prefill, or if no other engine may
    prefill the prompt."""
    prefix_hit: int = 0
    """Prompt tokens in this engine's prefix cache at the decision."""
    read_ahead: KvHandle | None = None
    """KV that was read before the prefill was done."""
    decision: Decision | None = None
    """How the prompt gets its KV; None until this was reported to the frontend."""
    cached: int = 0
    """After a remote prefill: this engine's prefix hit, or the prefill engine's if that is longer."""
    has_first_step: bool = False
    """Whether this engine has finished its first step for the request."""
    tokens: int = 0
    """Output tokens sent to the frontend, the prefill worker's first token included."""
    since: float = 0.0
    """While RUNNING: when the request entered the engine, or its last token came."""
    missed_slo: bool = False
    """Whether its TTFT or a gap was longer than its SLO."""
    warm_up_with: str = ""
    """Of a warm-up: instance id of the prefill worker."""
    kv_unread: bool = False
    """Whether its KV could not be read from the prefill worker."""
    failure: str = ""
    """Why it failed, without text of the request."""
    begins: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the prompt may be computed locally (`scheduling/prefill_slots.py`), or the request is cancelled."""
    computed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the prompt is computed, or the request is dropped."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the request is dropped."""
    arrived: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.hops = RequestHops(self.arrived)
        promise = self.submit.promise or Promise()
        self.due = math.inf if promise.ttft is None else self.arrived + promise.ttft
        """TTFT deadline."""
        self.gap = promise.gap or math.inf
        """Longest gap between two tokens by its SLO, in seconds."""

    @property
    def preferred(self) -> str:
        """Id of the only prefill worker that may compute the prompt; empty: any may."""
        return self.prefix.worker if self.prefix else ""

    @property
    def placed(self) -> Placed:
        assert self.decision is not None
        decision, hops = self.decision, list(self.hops.known)
        return Placed(self.id, decision.mode, decision.reason, self.cached, hops, self.has_first_step)

    @property
    def deadline(self) -> float:
        """Counts from the arrival at this worker."""
        return self.arrived + self.submit.timeout

    @property
    def id(self) -> str:
        return self.submit.request_id

    @property
    def awaits_answer(self) -> bool:
        """Whether it waits for a prefill worker's answer."""
        return self.answer is not None and not self.answer.done()

    def preferred_begun(self, begun: bool) -> None:
        """Record whether the preferred worker has begun the prompt; no effect if that is known."""
        if self.begun is not None and not self.begun.done():
            self.begun.set_result(begun)

    def resolve(self, outcome: Outcome) -> None:
        """End the wait for the prefill worker, if there is one."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(outcome)

    @property
    def needs_prefill_worker(self) -> bool:
        """Whether a prefill worker computes the prompt, or still holds its KV."""
        remote = self.decision is not None and self.decision.mode == "remote"
        return not self.has_first_step and (self.awaits_answer or remote)

    def recompute(self, reason: str) -> None:
        """Record that the KV is lost and this engine computes the prompt."""
        self.decision, self.cached = Decision("local", reason), 0
        self.local_tokens = len(self.submit.prompt) - self.prefix_hit

    @property
    def outcome(self) -> Outcome | None:
        """Outcome of the remote prefill; None if there is none yet."""
        return self.answer.result() if self.answer is not None and self.answer.done() else None

    def took(self, handle: KvHandle) -> bool:
        """Whether the request took this KV; the engine may be about to read it."""
        done = self.outcome
        return isinstance(done, PrefillDone) and source(done.handle) == source(handle)


class DecodeRequests:
    """Live requests by id. A recent id is refused even if its request is done: engines must not see an id twice."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._live: dict[str, DecodeRequest] = {}
        self._recent: LruDict[None] = LruDict(_REMEMBERED)
        self._empty = asyncio.Event()
        self._empty.set()
        self._added = asyncio.Event()

    def add(self, frontend: str, submit: Submit, warm_up_with: str = "") -> DecodeRequest | None:
        """Return None if the id was used before."""
        if submit.request_id in self._recent:
            return None
        self._recent[submit.request_id] = None
        died = submit.engines_died
        request = DecodeRequest(
            frontend, submit, prefiller=warm_up_with, warm_up_with=warm_up_with, engines_died=died
        )
        self._live[submit.request_id] = request
        self._added.set()
        if not warm_up_with:
            self._empty.clear()
        return request

    def get(self, request_id: str) -> DecodeRequest | None:
        return self._live.get(request_id)

    def drop(self, request: DecodeRequest) -> None:
        if self._live.pop(request.id, None) and request.submit.traceparent:
            self._trace(request)
        if not self._live:
            self._added.clear()
        request.over.set()
        request.computed.set()
        if all(left.warm_up_with for left in self._live.values()):
            self._empty.set()

    def _trace(self, request: DecodeRequest) -> None:
        """Send the worker's part of the request's trace."""
        submit, decision = request.submit, request.decision
        if (span := self._tracer.part("generate", request.arrived, submit.traceparent)) is None:
            return
        span.add_hops(request.hops.own, request.arrived)
        attributes: Attributes = {
            "pdserve.prompt_tokens": len(submit.prompt),
            "pdserve.cached_tokens": request.cached or request.prefix_hit,
            "pdserve.output_tokens": request.tokens,
            "pdserve.prefill": decision.mode if decision is not None else "",
            "pdserve.reason": decision.reason if decision is not None else "",
            "pdserve.why": "cancelled" if request.cancelled and not request.failure else "",
        }
        span.end(time.monotonic(), attributes, request.failure)

    def of(self, frontend: str) -> list[DecodeRequest]:
        return [request for request in self._live.values() if request.frontend == frontend]

    def clients(self) -> list[DecodeRequest]:
        """Requests of frontends: all but warm-ups."""
        return [request for request in self._live.values() if not request.warm_up_with]

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self.clients())

    @property
    def waiting(self) -> int:
        return sum(request.phase is Phase.WAITING for request in self.clients())

    @property
    def remote(self) -> int:
        return sum(request.awaits_answer for request in self.clients())

    @property
    def tokens(self) -> int:
        """Prompt and output tokens of all requests."""
        return sum(len(request.submit.prompt) + request.tokens for request in self._live.values())

    def occupying(self) -> list[DecodeRequest]:
        """Requests in the engine, and those whose prompts it will compute."""
        return [
            request
            for request in self._live.values()
            if request.phase is Phase.RUNNING or request.local_tokens
        ]

    async def pause(self, interval: float) -> None:
        """Sleep until the next tick. Without a request, first wait up to `IDLE_INTERVAL` for one."""
        if not self._live:
            with suppress(TimeoutError):
                async with asyncio.timeout(until_tick(IDLE_INTERVAL)):
                    await self._added.wait()
        await tick(interval)

    async def empty(self) -> None:
        """Wait until no request of a frontend is left."""
        await self._empty.wait()
