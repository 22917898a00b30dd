"""The requests of a decode worker, from their arrival to their last output."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from pdserve.decode.hops import RequestHops
from pdserve.decode.policy import Decision
from pdserve.kv.handles import source
from pdserve.messages import KvHandle, Placed, PrefillDone, PrefillFailed, Submit
from pdserve.observe.tracing import Attributes, Tracer
from pdserve.recent import RecentKeys

_REMEMBERED = 50_000
DOUBT = 1 / 6
"""share of a lease that is given away rather than asking for confirmation: 5 s"""
ASK_AGAIN = 1.0
"""seconds after which a confirmation is asked for anew, when the answer is said again"""

Outcome = PrefillDone | PrefillFailed | str
"""of asking for a remote prefill: what came back, or the reason why nothing will, as the metric has it"""

CANCELLED = "cancelled"
"""resolves the wait of a request that its client no longer wants"""
OWN = "own"
"""resolves that of a request which this worker itself, being of role `both`, took back"""


class Phase(Enum):
    WAITING = "waiting"
    """decided, published or answered, not yet in the engine"""
    RUNNING = "running"
    """in the engine"""


@dataclass
class KvAge:
    """How old the KV of an answer is at most, by this host's own clock and nothing else. Pure: times come from outside.

    KV that is read after its lease may be another prompt's: wrong tokens, and nothing shows it. What the prefill worker
    says of its age is true when it says so, but an answer may have been on its way for long: in the buffer of a
    connection that hung, or in that of this process while it hung itself. Two bounds hold whatever happened on the way:

    - The KV was computed after it was asked for.
    - An answer that carries the token of a `PrefillConfirm` was said after that was sent: it has been on its way for no
      longer than that was ago.
    """

    asked: float
    """when the KV was asked for"""
    token: str = ""
    confirm_asked: float = 0.0

    def seconds(self, answer: PrefillDone, now: float) -> float:
        """Since its KV was computed, at most."""
        bound = now - self.asked
        if self.token and answer.token == self.token:
            bound = min(bound, now - self.confirm_asked + max(0.0, answer.age))
        return bound

    def doubtful(self, answer: PrefillDone, now: float) -> bool:
        """Whether a confirmation might show that it is younger."""
        if self.token:
            return answer.token != self.token
        return self.seconds(answer, now) > DOUBT * answer.handle.lease

    def confirm(self, now: float) -> str | None:
        """The token to ask for a confirmation with; None where that was done just now."""
        if self.token and now < self.confirm_asked + ASK_AGAIN:
            return None
        self.token, self.confirm_asked = secrets.token_hex(4), now
        return self.token


@dataclass(eq=False)
class DecodeRequest:
    frontend: str
    submit: Submit
    phase: Phase = Phase.WAITING
    cancelled: bool = False
    """while WAITING: the task that works on it stops at its next step, and answers nothing"""
    answer: asyncio.Future[Outcome] | None = None
    """there from when it was sent out for remote prefill"""
    kv_age: KvAge | None = None
    """of the KV that it waits for; there from when it was sent out"""
    awaits_tokens: int = 0
    """of its prompt, that a prefill worker computes or will compute; 0 again from its answer on"""
    computes: int = 0
    """tokens of its prompt that this engine computes or will compute; 0 again from the first token on"""
    prefiller: str = ""
    """instance id of the prefill worker that has it in its hands"""
    losses: int = 0
    """of the queue, when it was sent out"""
    engines_died: int = 0
    """in a row, each while it computed the next token; above 0 it is a suspect (`decode/quarantine.py`)"""
    hit: int = 0
    """prompt tokens that were in the engine's prefix cache when it was decided"""
    ahead: KvHandle | None = None
    """what was read of its KV while that was being computed"""
    decision: Decision | None = None
    """how its prompt gets its KV; there when it goes into the engine"""
    cached: int = 0
    """prompt tokens that were a prefix hit, here or at the prefill worker"""
    proven: bool = False
    """it has got a token here"""
    tokens: int = 0
    """that it has got here"""
    since: float = 0.0
    """monotonic: when the engine got it, or its last token came; while RUNNING"""
    warms: str = ""
    """instance id of the prefill worker that it warms up with: it is this worker's own, and of no frontend"""
    unread: bool = False
    """its KV could not be read from the prefill worker"""
    failure: str = ""
    """why it failed; without the text of a request"""
    computed: asyncio.Event = field(default_factory=asyncio.Event)
    """set when its prompt is computed, or it leaves"""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """set when it leaves, in whatever way"""
    arrived: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.hops = RequestHops(self.arrived)

    @property
    def placed(self) -> Placed:
        """As far as it is known."""
        assert self.decision is not None
        return Placed(self.id, self.decision.mode, self.decision.reason, self.cached, list(self.hops.known))

    @property
    def deadline(self) -> float:
        """Monotonic seconds. That the request was on its way for a while only makes it later."""
        return self.arrived + self.submit.timeout

    @property
    def id(self) -> str:
        return self.submit.request_id

    @property
    def awaits(self) -> bool:
        """A prefill worker's answer."""
        return self.answer is not None and not self.answer.done()

    def resolve(self, answer: Outcome) -> None:
        """End the wait for the prefill worker, where there is a wait."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(answer)

    @property
    def elsewhere(self) -> bool:
        """A prefill worker computes its prompt, or has its KV, which is to be read."""
        remote = self.decision is not None and self.decision.mode == "remote"
        return not self.proven and (self.awaits or remote)

    @property
    def came_back(self) -> bool:
        """From the queue to this worker itself."""
        return self.answer is not None and self.answer.done() and self.answer.result() == OWN

    def took(self, kv: KvHandle) -> bool:
        """Whether this is the KV that it was given: it may be on its way into the engine."""
        if self.answer is None or not self.answer.done():
            return False
        answer = self.answer.result()
        if not isinstance(answer, PrefillDone):
            return False
        return source(answer.handle) == source(kv)


class DecodeRequests:
    """Ids are never used twice: a second request of a recent id is refused even when the first is done."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._live: dict[str, DecodeRequest] = {}
        self._recent: RecentKeys[None] = RecentKeys(_REMEMBERED)
        self._empty = asyncio.Event()
        self._empty.set()

    def add(self, frontend: str, submit: Submit, warms: str = "") -> DecodeRequest | None:
        """None where the id was used before."""
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
        """This worker's part of its trace, now that it is over here."""
        submit, decision = request.submit, request.decision
        if (span := self._tracer.part("generate", request.arrived, submit.traceparent)) is None:
            return
        span.add_hops(request.hops.here, request.arrived)
        told: Attributes = {
            "pdserve.prompt_tokens": len(submit.prompt),
            "pdserve.cached_tokens": request.cached,
            "pdserve.output_tokens": request.tokens,
            "pdserve.prefill": decision.mode if decision is not None else "",
            "pdserve.reason": decision.reason if decision is not None else "",
            "pdserve.why": "cancelled" if request.cancelled and not request.failure else "",
        }
        span.end(time.monotonic(), told, request.failure)

    def of(self, frontend: str) -> list[DecodeRequest]:
        return [request for request in self._live.values() if request.frontend == frontend]

    def clients(self) -> list[DecodeRequest]:
        """Without this worker's own warm-ups."""
        return [request for request in self._live.values() if not request.warms]

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self.clients())

    @property
    def waiting(self) -> int:
        return sum(request.phase is Phase.WAITING for request in self.clients())

    @property
    def tokens(self) -> int:
        """Of all prompts and outputs so far."""
        return sum(len(request.submit.prompt) + request.tokens for request in self._live.values())

    def occupying(self) -> list[DecodeRequest]:
        """Those in the engine, and those whose prompts it will compute."""
        return [
            request for request in self._live.values() if request.phase is Phase.RUNNING or request.computes
        ]

    async def empty(self) -> None:
        """Wait until no client's request is left."""
        await self._empty.wait()
