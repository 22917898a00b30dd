"""The requests that a decode worker has, from their arrival to their last output."""

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from pdserve.contract.messages import KvHandle, Placed, PrefillDone, PrefillFailed, Promise, Submit
from pdserve.decode.hops import RequestHops
from pdserve.decode.policy.decision import Decision
from pdserve.kv.handles import source
from pdserve.observe.tracing import Attributes, Tracer
from pdserve.util.lru import LruDict

_REMEMBERED = 50_000

Outcome = PrefillDone | PrefillFailed | str
"""of a remote prefill: the answer, or the reason why none will come, as a label of the failure metric"""

CANCELLED = "cancelled"
"""outcome when the request was cancelled"""
OWN = "own"
"""outcome when this worker, of role `both`, took its own request back from the queue"""
STAND_IN = "stand-in"
"""why a prefill worker that decodes prefills locally"""


class Phase(Enum):
    WAITING = "waiting"
    """not in the engine yet: undecided, queued for prefill, or answered"""
    RUNNING = "running"
    """in the engine"""


@dataclass(eq=False)
class DecodeRequest:
    frontend: str
    submit: Submit
    phase: Phase = Phase.WAITING
    cancelled: bool = False
    """while WAITING: the request's task stops at its next step and sends nothing"""
    answer: asyncio.Future[Outcome] | None = None
    """of the remote prefill; None until it is asked for"""
    asked: float = 0.0
    """when a remote prefill was asked for; monotonic seconds"""
    turn: asyncio.Future[None] | None = None
    """done when its prompt may be published (`decode/remote/publisher.py`)"""
    published: bool = False
    """its prompt is in the prefill queue, or was"""
    awaits_tokens: int = 0
    """prompt tokens that a prefill worker computes or will compute; 0 after its answer"""
    computes: int = 0
    """prompt tokens that this engine computes or will compute; 0 after the first token"""
    prefiller: str = ""
    """instance id of the prefill worker that pulled the prompt"""
    losses: int = 0
    """`queue.losses` when the prompt was published"""
    engines_died: int = 0
    """engines in a row that died while they computed its next token; above 0: a suspect (`quarantine.py`)"""
    hit: int = 0
    """prompt tokens in this engine's prefix cache when the prefill was decided"""
    ahead: KvHandle | None = None
    """the part of its KV that was read before the prefill was done"""
    decision: Decision | None = None
    """how the prompt gets its KV; None until the frontend has it"""
    cached: int = 0
    """prompt tokens in a prefix cache, here or at the prefill worker"""
    proven: bool = False
    """this engine has done its first step for it"""
    tokens: int = 0
    """output tokens sent from here, the prefill worker's first token included"""
    since: float = 0.0
    """while RUNNING: when it entered the engine, or its last token came; monotonic seconds"""
    broken: bool = False
    """its first token came later, or two tokens further apart, than promised"""
    warms: str = ""
    """of a warm-up, which no frontend sent: instance id of the prefill worker"""
    unread: bool = False
    """its KV could not be read from the prefill worker"""
    failure: str = ""
    """why it failed, without text of the request"""
    begins: asyncio.Event = field(default_factory=asyncio.Event)
    """set when its prompt may be computed here, or it was cancelled before (`decode/scheduling/prefill_slots.py`)"""
    computed: asyncio.Event = field(default_factory=asyncio.Event)
    """set when the prompt is computed, or the request is dropped"""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """set when the request is dropped"""
    arrived: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.hops = RequestHops(self.arrived)
        promise = self.submit.promise or Promise()
        self.due = math.inf if promise.ttft is None else self.arrived + promise.ttft
        """when its first token is promised"""
        self.gap = promise.gap or math.inf
        """promised between two tokens, in seconds"""

    @property
    def placed(self) -> Placed:
        assert self.decision is not None
        decision, hops = self.decision, list(self.hops.known)
        return Placed(self.id, decision.mode, decision.reason, self.cached, hops, self.proven)

    @property
    def deadline(self) -> float:
        """In monotonic seconds. The request's delay on the way here is not counted."""
        return self.arrived + self.submit.timeout

    @property
    def id(self) -> str:
        return self.submit.request_id

    @property
    def awaits(self) -> bool:
        """Whether it waits for a prefill worker's answer."""
        return self.answer is not None and not self.answer.done()

    def resolve(self, answer: Outcome) -> None:
        """End the wait for the prefill worker; no effect if there is none."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(answer)

    @property
    def elsewhere(self) -> bool:
        """Whether a prefill worker computes the prompt, or still holds its KV."""
        remote = self.decision is not None and self.decision.mode == "remote"
        return not self.proven and (self.awaits or remote)

    def recompute(self, reason: str) -> None:
        """The KV that was to be read is lost: this engine computes the prompt."""
        self.decision, self.cached = Decision("local", reason), 0
        self.computes = len(self.submit.prompt) - self.hit

    @property
    def outcome(self) -> Outcome | None:
        """Of the remote prefill; None if it was not asked for, or is under way."""
        return self.answer.result() if self.answer is not None and self.answer.done() else None

    def took(self, kv: KvHandle) -> bool:
        """Whether `kv` is what the request waited for: the engine may be about to read it."""
        done = self.outcome
        return isinstance(done, PrefillDone) and source(done.handle) == source(kv)


class DecodeRequests:
    """A second request of a recent id is refused, even if the first is done: engines must not see an id twice."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._live: dict[str, DecodeRequest] = {}
        self._recent: LruDict[None] = LruDict(_REMEMBERED)
        self._empty = asyncio.Event()
        self._empty.set()

    def add(self, frontend: str, submit: Submit, warms: str = "") -> DecodeRequest | None:
        """None if the id was used before."""
        if submit.request_id in self._recent:
            return None
        self._recent[submit.request_id] = None
        request = DecodeRequest(
            frontend, submit, prefiller=warms, warms=warms, engines_died=submit.engines_died
        )
        self._live[submit.request_id] = request
        if not warms:
            self._empty.clear()
        return request

    def get(self, request_id: str) -> DecodeRequest | None:
        return self._live.get(request_id)

    def drop(self, request: DecodeRequest) -> None:
        if self._live.pop(request.id, None) and request.submit.traceparent:
            self._trace(request)
        request.over.set()
        request.computed.set()
        if all(left.warms for left in self._live.values()):
            self._empty.set()

    def _trace(self, request: DecodeRequest) -> None:
        """Send the worker's span of the request's trace."""
        submit, decision = request.submit, request.decision
        if (span := self._tracer.part("generate", request.arrived, submit.traceparent)) is None:
            return
        span.add_hops(request.hops.here, request.arrived)
        attributes: Attributes = {
            "pdserve.prompt_tokens": len(submit.prompt),
            "pdserve.cached_tokens": request.cached or request.hit,
            "pdserve.output_tokens": request.tokens,
            "pdserve.prefill": decision.mode if decision is not None else "",
            "pdserve.reason": decision.reason if decision is not None else "",
            "pdserve.why": "cancelled" if request.cancelled and not request.failure else "",
        }
        span.end(time.monotonic(), attributes, request.failure)

    def of(self, frontend: str) -> list[DecodeRequest]:
        return [request for request in self._live.values() if request.frontend == frontend]

    def clients(self) -> list[DecodeRequest]:
        """Those of frontends: all but warm-ups."""
        return [request for request in self._live.values() if not request.warms]

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self.clients())

    @property
    def waiting(self) -> int:
        return sum(request.phase is Phase.WAITING for request in self.clients())

    @property
    def remote(self) -> int:
        return sum(request.awaits for request in self.clients())

    @property
    def tokens(self) -> int:
        """Prompt and output tokens of all requests."""
        return sum(len(request.submit.prompt) + request.tokens for request in self._live.values())

    def occupying(self) -> list[DecodeRequest]:
        """Requests in the engine, and those whose prompts it will compute."""
        return [
            request for request in self._live.values() if request.phase is Phase.RUNNING or request.computes
        ]

    async def empty(self) -> None:
        """Wait until no client's request is left."""
        await self._empty.wait()
