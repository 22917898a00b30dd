"""The errors that pdserve raises.

PdserveError
├── ConfigError             the YAML, a flag or the machine does not fit; exit code 2
├── Unavailable             a peer is not reachable now: fall back, wait or answer 503
│   ├── QueueUnavailable        NATS is disconnected: prefill locally
│   │   └── QueueFull               NATS is connected, but the queue is full
│   ├── RegistryUnavailable     etcd is disconnected: use the last known topology
│   └── PeerGone                the process at the other end of a stream cannot be reached any more
├── BadRequest              the request is invalid, so a retry would fail too; 400
├── Overloaded              a limit is reached; 429 with Retry-After
├── EngineDead              the engine process died; the worker must exit
└── ProtocolError           a message cannot be decoded, or encoded
"""

import math
from dataclasses import dataclass


class PdserveError(Exception):
    """Base of the tree above. Its attributes go into the HTTP response to the client."""

    status = 500
    param: str | None = None
    """the invalid field or header of the request"""
    retry_after: float = 0.0
    """seconds; 0: do not retry"""
    limit: str = ""
    """the limit of the API key that was reached: `requests` or `tokens`"""


@dataclass
class ConfigError(PdserveError):
    """The configuration is invalid. Each of `problems` is a sentence with file, line and key where they are known, and
    what to do."""

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
    """`peer` (an instance or frontend id, or an address) cannot be reached any more."""

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
    """A limit was reached; `what` names it."""

    what: str
    retry_after: float = 1.0
    status = 429

    def __str__(self) -> str:
        return f"{self.what}; try again in {retry_after_seconds(self.retry_after)} s"


class EngineDead(PdserveError):
    """The engine died. `crashed`: by itself, so one of its running requests may be the cause. `killed`: by a signal
    from outside. Neither: for example, it hangs, or another of its hosts was lost."""

    status = 503

    def __init__(self, message: str, *, crashed: bool = False, killed: bool = False) -> None:
        super().__init__(message)
        self.crashed = crashed
        self.killed = killed


class ProtocolError(PdserveError):
    pass


def retry_after_seconds(seconds: float) -> int:
    """Round up for HTTP's Retry-After, since a client that retries too early is refused again."""
    return max(1, math.ceil(seconds))


def error_text(error: BaseException, otherwise: str = "") -> str:
    """Return the error's message; if it has none, like a TimeoutError, `otherwise` or its type's name."""
    return str(error) or otherwise or type(error).__name__


def leaf_errors(error: BaseException) -> list[BaseException]:
    """Return the errors inside exception groups, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaf_errors(inner)]
    return [error]


def find_engine_death(error: BaseException | None) -> EngineDead | None:
    """Return the EngineDead that this error is, or that its exception group contains."""
    leaves = leaf_errors(error) if error is not None else ()
    return next((leaf for leaf in leaves if isinstance(leaf, EngineDead)), None)
