"""What is known of one HTTP request, carried from the HTTP edge down to the engine core and back.

vLLM's app lies between the two, unchanged; a context variable crosses it, so that the core can record to which decode
worker the request went, and the edge can put that into headers, metrics and its log line.
"""

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Self

from pdserve.errors import BadRequest
from pdserve.frontend.admission.control import Admission
from pdserve.frontend.deltas import DeltaStream

RETRY_AFTER = 5.0
"""seconds that a client is told to wait where no worker can serve it now"""


@dataclass(frozen=True)
class RequestFailure:
    """Why a request ended without an answer."""

    status: int
    message: str
    retry_after: float = 0.0
    """seconds; 0 where trying again makes no sense"""
    redirect: bool = False
    """nothing of it was generated, and there is another model of the same name by now, which can answer it"""

    @classmethod
    def no_worker(cls, model: str, why: str = "") -> Self:
        """The request has waited for a decode worker until its deadline."""
        since = f" ({why})" if why else ""
        message = f"no decode worker of {model} came up within the request's deadline{since}"
        return cls(503, message, RETRY_AFTER)

    @classmethod
    def model_replaced(cls, model: str, redirect: bool) -> Self:
        """The request waits for a decode worker that has what is no longer served."""
        why = f"{model} was replaced by another model of this name, and no worker of the one before is left"
        return cls(503, f"{why}; send the request again", RETRY_AFTER, redirect)


@dataclass
class RequestTrace:
    request_id: str
    path: str
    deadline: float
    """monotonic, as `started`"""
    model: str = ""
    started: float = field(default_factory=time.monotonic)
    key: str = ""
    """name of the API key that it came with; empty where no keys are configured"""
    headers: dict[str, str] = field(default_factory=dict)
    """of its answer, whatever that will be"""
    usage_headers: Callable[[], Mapping[str, str]] = dict
    """the same, of what its key has left when the answer begins"""
    first_token: float | None = None
    """monotonic, as `started`"""
    output_tokens: int = 0
    failure: RequestFailure | None = None
    admission: Admission | None = None
    """that permits its sequences; None: they begin at once"""
    deltas: DeltaStream | None = None
    """of a plain stream"""
    _prompts: dict[str, int] = field(default_factory=dict)
    _prefill: dict[str, str] = field(default_factory=dict)
    """by generation"""
    _instances: dict[str, None] = field(default_factory=dict)

    def restarted(self) -> "RequestTrace":
        """The same request, as if nothing had been done for it."""
        before = self.model, self.started, self.key, self.headers, self.usage_headers
        return RequestTrace(self.request_id, self.path, self.deadline, *before)

    def add_prompt(self, key: str, tokens: int) -> None:
        """A prompt of this request; the several outputs of n > 1 share one key and are counted once."""
        self._prompts[key] = tokens

    def sent_to(self, instance: str) -> None:
        self._instances[instance] = None

    def prefilled(self, generation: str, mode: str) -> None:
        self._prefill[generation] = mode

    def add_tokens(self, count: int) -> None:
        if self.first_token is None:
            self.first_token = time.monotonic()
        self.output_tokens += count

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompts.values())

    @property
    def prefill(self) -> str:
        """`local`, `remote`, or `local,remote` where parts of one request (n > 1, several prompts) differed."""
        return ",".join(sorted(set(self._prefill.values())))

    @property
    def instances(self) -> str:
        """Every decode worker that worked on it, in order."""
        return ",".join(self._instances)

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.started


current_trace: ContextVar[RequestTrace | None] = ContextVar("pdserve_trace", default=None)


def seconds_allowed(asked: str | None, default: float, most: float) -> float:
    """How long a request may take: as its header `x-request-timeout` has it, or the configured default. Raises
    BadRequest for what is no number of seconds, or more than the configured maximum."""
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
