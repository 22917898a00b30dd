"""The router: choose one decode worker among the candidates (`candidates.py`). Pure functions.

`likely_to_keep` drops workers that are clearly less likely to keep the request's promise (`contract/slo.py`) than the
best one. `choose` applies the router policy to the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.contract.messages import Load, Promise
from pdserve.contract.records import Instance
from pdserve.contract.slo import MIN_MISS_DIFFERENCE, gap_miss_probability, ttft_miss_probability

LOAD_WEIGHT = 0.1
"""Cost of an outstanding token at a worker, in tokens to prefill. It is far below 1, because most outstanding tokens
have their KV already and only share engine steps with the new request (decision 0031)."""


@dataclass(frozen=True)
class Forecast:
    """Expected latency of one request at one worker, in seconds."""

    ttft: float
    gap: float

    @classmethod
    def of(cls, load: Load, sent: int, prompt: int) -> "Forecast":
        """`sent`: prompt tokens sent to the worker since it reported this load. `prompt`: prompt tokens of the request
        that the worker has not cached."""
        return cls(load.prompt_wait + (sent + prompt) * load.token_seconds, load.gap_seconds)

    def miss_probability(self, promise: Promise) -> float:
        kept = 1.0 if promise.ttft is None else 1 - ttft_miss_probability(self.ttft, promise.ttft)
        return 1 - kept * (1.0 if promise.gap is None else 1 - gap_miss_probability(self.gap, promise.gap))


def likely_to_keep(
    promise: Promise, candidates: Sequence[Instance], forecasts: Mapping[str, Forecast]
) -> list[Instance]:
    """Return the candidates that are about as likely to keep the promise as the best one, and those without a
    forecast."""
    missed = {
        each.id: forecasts[each.id].miss_probability(promise) for each in candidates if each.id in forecasts
    }
    best = min(missed.values(), default=0.0)
    return [each for each in candidates if missed.get(each.id, 0.0) <= best + MIN_MISS_DIFFERENCE]


def choose(
    policy: str, candidates: Sequence[Instance], outstanding: Mapping[str, float], cached: Mapping[str, int]
) -> Instance:
    """Choose one of the candidates, which are in round-robin order. The first wins a tie.

    `outstanding`: by instance id, tokens of KV that the worker's requests need, those of other frontends included.
    `cached`, for `kv`: by instance id, leading prompt tokens whose KV the worker has."""

    def load(instance: Instance) -> float:
        """Outstanding tokens as a share of the worker's KV cache."""
        return outstanding.get(instance.id, 0.0) / (instance.kv_tokens or 1)

    def cost(instance: Instance) -> tuple[float, float]:
        """Weighted outstanding tokens minus cached ones (the prompt's length is the same for all); then the load."""
        return LOAD_WEIGHT * outstanding.get(instance.id, 0.0) - cached.get(instance.id, 0), load(instance)

    match policy:
        case "round-robin":
            return candidates[0]
        case "least-loaded":
            return min(candidates, key=load)
        case "kv":
            return min(candidates, key=cost)
    raise ValueError(f"unknown router {policy!r}")
