"""Every error that pdserve raises on purpose.

PdserveError
├── ConfigError             the YAML, a flag or the machine cannot do what was asked; exit code 2
├── Unavailable             a peer is not there now; the caller falls back, waits or answers 503
│   ├── QueueUnavailable        NATS is not connected: prefill locally
│   │   └── QueueFull               NATS is connected, but the queue is full
│   ├── RegistryUnavailable     etcd is not connected: keep the last known topology
│   └── PeerGone                the process at the other end of a stream is gone
├── BadRequest              the client's request cannot be served, and repeating it would not help; 400
├── Overloaded              a bound is reached; 429 with Retry-After
├── EngineDead              the engine core is gone; the worker process must exit
└── ProtocolError           a peer sent something that does not fit its contract
"""

import math
from dataclasses import dataclass


class PdserveError(Exception):
    """Base of the tree above. The attributes go into the answer of a client that the error reaches: the HTTP `status`;
    `param`, the field or header of the request that is at fault; `retry_after` in seconds, 0: do not retry; and
    `limit`, the limit of the API key that was reached, `requests` or `tokens`."""

    status = 500
    param: str | None = None
    retry_after: float = 0.0
    limit: str = ""


@dataclass
class ConfigError(PdserveError):
    """Something in the configuration is wrong: `problems` holds one complete sentence for each finding,
    naming file, line and key where they are known, and what to do."""

    problems: list[str]
    status = 400

    def __str__(self) -> str:
        return "\n".join(self.problems)


class Unavailable(PdserveError):
    status = 503


class QueueUnavailable(Unavailable):
    pass


class QueueFull(QueueUnavailable):
    pass


class RegistryUnavailable(Unavailable):
    pass


@dataclass
class PeerGone(Unavailable):
    """The process `peer` (an instance or frontend id, or an address) cannot be reached any more."""

    peer: str

    def __str__(self) -> str:
        return f"{self.peer} is gone"


class BadRequest(PdserveError):
    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass
class Overloaded(PdserveError):
    """The bound that `what` names was reached."""

    what: str
    retry_after: float = 1.0
    status = 429

    def __str__(self) -> str:
        return f"{self.what}; try again in {retry_after_seconds(self.retry_after)} s"


class EngineDead(PdserveError):
    """`crashed`: the engine ended by itself, so that one of the requests that it computed may be the cause. `killed`:
    something outside ended it. Else it hangs, or lost another host."""

    status = 503

    def __init__(self, message: str, *, crashed: bool = False, killed: bool = False) -> None:
        super().__init__(message)
        self.crashed, self.killed = crashed, killed


class ProtocolError(PdserveError):
    pass


def retry_after_seconds(seconds: float) -> int:
    """Return seconds for HTTP's Retry-After, rounded up, since a client that comes too early is refused again."""
    return max(1, math.ceil(seconds))


def error_text(error: BaseException, otherwise: str = "") -> str:
    """What it says; where it says nothing (as a TimeoutError), `otherwise` or the name of its type."""
    return str(error) or otherwise or type(error).__name__


def leaf_errors(error: BaseException) -> list[BaseException]:
    """Return the errors inside exception groups, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaf_errors(inner)]
    return [error]


def find_engine_death(error: BaseException | None) -> EngineDead | None:
    """Return the engine's death that this error is, or that is inside its exception group."""
    found = (leaf for leaf in leaf_errors(error) if isinstance(leaf, EngineDead)) if error is not None else ()
    return next(iter(found), None)
