"""The state of one HTTP request, shared by the HTTP edge and the engine core.

vLLM's app runs unchanged between the two. A context variable passes the state through it, so that the core can record
the request's decode workers, and the edge can put them into headers, metrics and the log.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Self

from pdserve.contract.messages import Hop, Placed
from pdserve.contract.reports import HOPS
from pdserve.contract.slo import NO_SLO, SloTargets
from pdserve.frontend.admission.granted import Admission
from pdserve.frontend.edge.deltas import DeltaStream
from pdserve.observe.tracing import TracedSpan
from pdserve.util.errors import BadRequest

MAX_HOPS = 32
"""Maximum of recorded hops of a request, because a request may be retried twice a second."""
MAX_WHY = 300
"""Maximum of characters in an error or a reason."""
LONGEST = 1e6
"""Maximum of a hop's start and of its duration, in seconds. Larger values from a worker are cut to it."""
NO_WORKER = "no decode worker is available"
LOADING = "this frontend loads the model's tokenizer"
PAUSED = "preempted for another client"
CLIENT_LEFT = 499
"""Status of a request whose client left."""
RETRY_AFTER = 5.0
"""Seconds after which a client may retry when no worker can serve it."""


@dataclass(frozen=True)
class RequestFailure:
    """Why a request failed."""

    status: int
    message: str
    retry_after: float = 0.0
    """Seconds; 0 if a retry is pointless."""
    redirect: bool = False
    """Whether the new model of the same name can answer the request, because nothing was generated yet."""
    param: str | None = None
    """The invalid field of the request."""

    @classmethod
    def no_worker(cls, model: str, why: str = "") -> Self:
        """For a request that has waited for a decode worker until its deadline."""
        since = f" ({why})" if why else ""
        message = f"no decode worker of {model} came up within the request's deadline{since}"
        return cls(503, message, RETRY_AFTER)

    @classmethod
    def model_replaced(cls, model: str, redirect: bool) -> Self:
        """For a request that waits for a decode worker of a model that was replaced."""
        why = f"{model} was replaced by another model of this name, and no worker of the old one is left"
        return cls(503, f"{why}; send the request again", RETRY_AFTER, redirect)


SHUTTING_DOWN = RequestFailure(503, "the frontend is shutting down", RETRY_AFTER)


class SequenceHops:
    """The hops of one sequence, in the frontend and at its decode workers. No method is called per token."""

    def __init__(self, started: float) -> None:
        self._started = started
        """Monotonic, as all times of this class."""
        self._past: list[Hop] = []
        self._held: tuple[float, str] | None = None
        """Since when and why the frontend holds the sequence."""
        self._sent: float | None = None
        """Time of sending the sequence to its worker; None if no worker has it."""
        self._instance = ""
        self._reported: list[Hop] = []
        """The hops in this worker's last report."""
        self._first_output: float | None = None
        """Time of this worker's first output."""

    def held(self, why: str = "") -> None:
        """The frontend holds the sequence back. A later reason does not replace the first."""
        if self._held is None:
            self._held = time.monotonic(), why

    def released(self) -> None:
        if self._held is not None:
            self._keep([self._holding(time.monotonic())])
            self._held = None

    def sent(self, instance: str) -> None:
        self.released()
        self._sent, self._instance, self._reported, self._first_output = time.monotonic(), instance, [], None

    def reported(self, hops: Sequence[Hop]) -> None:
        """Replace the worker's hops by its newest report."""
        if self._sent is not None:
            offset = self._sent - self._started
            self._reported = [
                Hop(
                    hop.name,
                    offset + _bounded(hop.start),
                    _bounded(hop.seconds),
                    hop.instance[:MAX_WHY] or self._instance,
                    hop.why[:MAX_WHY],
                )
                for hop in hops[:MAX_HOPS]
                if hop.name in HOPS
            ]

    def decoding(self) -> None:
        """Record the worker's first output; further calls do nothing."""
        if self._first_output is None:
            self._first_output = time.monotonic()

    def left(self, last_token: float) -> list[Hop]:
        """Record that the sequence left its worker; return the hops there. `last_token`: time of the sequence's last
        token, perhaps of an earlier worker."""
        hops = self._at_worker(last_token)
        self._keep(hops)
        self._sent = None
        return hops

    def migrated(self, why: str) -> None:
        self._keep([Hop("migration", time.monotonic() - self._started, 0.0, self._instance, why[:MAX_WHY])])

    def until(self, now: float) -> list[Hop]:
        """Return all hops, sorted by start; an unfinished hop ends at `now`."""
        held = [] if self._held is None else [self._holding(now)]
        return sorted([*self._past, *held, *self._at_worker(now)], key=lambda hop: hop.start)

    def _holding(self, now: float) -> Hop:
        assert self._held is not None
        since, why = self._held
        return Hop("admission", since - self._started, now - since, why=why)

    def _at_worker(self, last_token: float) -> list[Hop]:
        if self._sent is None:
            return []
        if self._first_output is None or last_token < self._first_output:
            return self._reported
        since, seconds = self._first_output - self._started, last_token - self._first_output
        return [*self._reported, Hop("decode", since, seconds, self._instance)]

    def _keep(self, hops: list[Hop]) -> None:
        self._past += hops[: MAX_HOPS - len(self._past)]


def _bounded(seconds: float) -> float:
    return min(max(0.0, seconds), LONGEST)  # in this order NaN is 0, too


@dataclass
class RequestState:
    request_id: str
    path: str
    deadline: float
    """monotonic, as `started`"""
    model: str = ""
    started: float = field(default_factory=time.monotonic)
    key: str = ""
    """name of its API key; empty if no keys are configured"""
    headers: dict[str, str] = field(default_factory=dict)
    """extra headers of its response, whatever the status"""
    usage_headers: Callable[[], Mapping[str, str]] = dict
    """makes headers when the response begins: what its key's limits leave"""
    promised: SloTargets = NO_SLO
    first_token: float | None = None
    """monotonic, as `started`"""
    longest_gap: float = 0.0
    """longest time in seconds between two tokens of a sequence"""
    longest_gap_end: float = 0.0
    """when that gap ended; monotonic, as `started`"""
    output_tokens: int = 0
    failure: RequestFailure | None = None
    admission: Admission | None = None
    """grants its sequences' permits; None: it generates nothing"""
    deltas: DeltaStream | None = None
    has_tools: bool = False
    """whether its response is parsed for tool calls"""
    retries: int = 0
    """migrations of its sequences"""
    span: TracedSpan | None = None
    """None: not traced"""
    client: str = ""
    """as `client_of` names it"""
    pixels: int = 0
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """called by `release`"""
    hops: SequenceHops = field(init=False)
    """of its first sequence"""
    _hops_taken: bool = False
    _prompts: dict[str, int] = field(default_factory=dict)
    _cached: dict[str, int] = field(default_factory=dict)
    _placed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """by generation: `local`, `remote` or `unknown` prefill, and the reason"""
    _instances: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hops = SequenceHops(self.started)

    def restarted(self) -> "RequestState":
        """Return a new state for the request at another model: without admission, tokens and failure."""
        before = self.model, self.started, self.key, self.headers, self.usage_headers
        state = RequestState(self.request_id, self.path, self.deadline, *before)
        state.hops, state.retries, state.span = self.hops, self.retries, self.span
        state.client, state.at_end = self.client, self.at_end
        return state

    def release(self) -> None:
        """Free the request's resources, at its end."""
        for end in self.at_end:
            end()

    def sequence_hops(self) -> SequenceHops:
        """Return the hops for one more sequence; only those of the first are kept."""
        first, self._hops_taken = not self._hops_taken, True
        return self.hops if first else SequenceHops(self.started)

    def add_prompt(self, key: str, tokens: int) -> None:
        """Count a prompt once per key. All outputs of n > 1 share a key, and so do all beams."""
        self._prompts.setdefault(key, tokens)

    def sent_to(self, instance: str) -> None:
        self._instances[instance] = None

    def prefilled(self, generation: str, placed: Placed) -> None:
        prefill = placed.prefill if placed.prefill in ("local", "remote") else "unknown"
        self._placed[generation] = prefill, placed.reason[:MAX_WHY]

    def add_cached(self, key: str, tokens: int) -> int:
        """Return the first count for this prompt, because further outputs of n > 1 find the KV of the first one."""
        return self._cached.setdefault(key, tokens)

    def add_tokens(self, count: int, gap: float | None) -> None:
        """Count tokens passed to the client, `gap` seconds after the previous ones."""
        if self.first_token is None:
            self.first_token = time.monotonic()
        elif gap is not None and gap > self.longest_gap:
            self.longest_gap, self.longest_gap_end = gap, time.monotonic()
        self.output_tokens += count

    @property
    def is_flex(self) -> bool:
        return self.admission is not None and self.admission.is_flex

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompts.values())

    @property
    def prefill(self) -> str:
        """`local`, `remote`, or `local,remote` if its sequences (n > 1, several prompts) differed."""
        return ",".join(sorted({prefill for prefill, _ in self._placed.values()}))

    @property
    def reason(self) -> str:
        """The decode workers' reasons for `prefill`, those for `local` first."""
        return ",".join(dict.fromkeys(reason for _, reason in sorted(set(self._placed.values()))))

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    @property
    def instances(self) -> list[str]:
        """Every decode worker to which it was sent, in order."""
        return list(self._instances)

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.started


current_request: ContextVar[RequestState | None] = ContextVar("pdserve_request", default=None)


def seconds_allowed(asked: str | None, default: float, most: float) -> float:
    """Return how many seconds a request may take: `asked` by its header `x-request-timeout`, or the default. Raises
    BadRequest if that is no number above 0, or exceeds the configured maximum."""
    if asked is None:
        return default
    try:
        seconds = float(asked)
    except ValueError:
        seconds = 0.0
    most = max(most, default)
    if not 0 < seconds <= most:  # also catches NaN
        message = f"x-request-timeout must be a number of seconds above 0 and up to {most:g}"
        raise BadRequest(message, "x-request-timeout")
    return seconds
