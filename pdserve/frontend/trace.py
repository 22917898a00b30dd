"""What is known of one HTTP request, carried from the edge down to the engine core and back.

vLLM's app lies between the two, unchanged; a context variable crosses it, so that the core can say to which
decode worker the request went, and the edge can put that into headers, metrics and its log line.
"""

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Failure:
    """Why a request ended without an answer; `retry_after` is in seconds, 0 where trying again makes no
    sense."""

    status: int
    message: str
    retry_after: float = 0.0
    again: bool = False
    """nothing of it was generated, and there is another model of the same name by now, which can answer it"""


RETRY_AFTER = 5.0
"""seconds that a client is told to wait where nobody can serve it now"""


def no_worker(model: str, why: str = "") -> Failure:
    """Where a request has waited for a decode worker until its deadline."""
    since = f" ({why})" if why else ""
    return Failure(
        503, f"no decode worker of {model} came up within the request's deadline{since}", RETRY_AFTER
    )


def replaced(model: str, again: bool) -> Failure:
    """Where a request waits for a decode worker that has what is no longer served."""
    why = f"{model} was replaced by another model of this name, and no worker of the one before is left"
    return Failure(503, f"{why}; send the request again", RETRY_AFTER, again)


class Turn(Protocol):
    """Of one sequence, at the decode workers. It must be ended."""

    @property
    def held(self) -> bool:
        """It has come, and the sequence is not over."""

    @property
    def asked(self) -> bool: ...

    def ask(self) -> None:
        """May begin the sequence at once."""

    def end(self) -> None:
        """May be called twice."""


class Turns(Protocol):
    def sequence(self, begin: Callable[[], None], drop: Callable[[], None]) -> Turn:
        """For one more sequence of the request; `begin` is called when its turn has come, or `drop` when the request
        ended before."""


@dataclass
class Trace:
    request_id: str
    deadline: float
    """monotonic, as `started`"""
    model: str = ""
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    """monotonic, as `started`"""
    output_tokens: int = 0
    failure: Failure | None = None
    turns: Turns | None = None
    """where its sequences wait for places; None: they are begun at once"""
    _prompts: dict[str, int] = field(default_factory=dict)
    _prefill: dict[str, None] = field(default_factory=dict)
    _instances: dict[str, None] = field(default_factory=dict)

    def anew(self) -> "Trace":
        """The same request, as if nothing had been done for it."""
        return Trace(self.request_id, self.deadline, self.model, self.started)

    def prompt(self, key: str, tokens: int) -> None:
        """A prompt of this request; the several outputs of n > 1 share one key and are counted once."""
        self._prompts[key] = tokens

    def sent_to(self, instance: str) -> None:
        self._instances[instance] = None

    def prefilled(self, mode: str) -> None:
        self._prefill[mode] = None

    def token(self, count: int) -> None:
        if self.first_token is None:
            self.first_token = time.monotonic()
        self.output_tokens += count

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompts.values())

    @property
    def prefill(self) -> str:
        """`local`, `remote`, or `local,remote` where parts of one request (n > 1, several prompts)
        differed."""
        return ",".join(sorted(self._prefill))

    @property
    def instances(self) -> str:
        """Every decode worker that worked on it, in order."""
        return ",".join(self._instances)

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.started


current_trace: ContextVar[Trace | None] = ContextVar("pdserve_trace", default=None)
