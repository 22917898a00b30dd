"""Which of the candidates are expected to keep a request's promise (`slo.py`): the router chooses among these. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.messages import Load, Promise
from pdserve.records import Instance
from pdserve.slo import MATTERS, late, torn


@dataclass(frozen=True)
class Prospect:
    """Of a request at a worker, in seconds."""

    first: float
    """until its first token"""
    gap: float
    """between two tokens"""

    @classmethod
    def of(cls, load: Load, sent: int, prompt: int) -> "Prospect":
        """`sent`: tokens of the prompts sent since the worker reported this load; `prompt`: of the request's, without
        what the worker has cached."""
        return cls(load.prompt_wait + (sent + prompt) * load.token_seconds, load.gap_seconds)

    def broken(self, promise: Promise) -> float:
        """The probability that the promise is broken."""
        kept = 1.0 if promise.ttft is None else 1 - late(self.first, promise.ttft)
        return 1 - kept * (1.0 if promise.gap is None else 1 - torn(self.gap, promise.gap))


def keeping(
    promise: Promise, candidates: Sequence[Instance], prospects: Mapping[str, Prospect]
) -> list[Instance]:
    """The candidates that are expected to keep the promise about as well as the best of them, and those of which
    nothing is known."""
    broken = {each.id: prospects[each.id].broken(promise) for each in candidates if each.id in prospects}
    best = min(broken.values(), default=0.0)
    return [each for each in candidates if broken.get(each.id, 0.0) <= best + MATTERS]
