"""Which of the candidates (`candidates.py`) gets a request: pure, so that it is tested by tables."""

from collections.abc import Mapping, Sequence

from pdserve.contract.records import Instance

LOAD_WEIGHT = 0.1
"""tokens to prefill that one token outstanding at a worker is worth. A request goes where it finds a prefix until that
worker has ten times as many tokens more than another as the prefix saves. Far below 1, because most of what is
outstanding has its KV already and only shares the steps with the new request (decision 0031 has other weights)."""


def choose(
    policy: str, candidates: Sequence[Instance], outstanding: Mapping[str, float], cached: Mapping[str, int]
) -> Instance:
    """One of the candidates, which come in turn and are never none: a tie goes to the first.

    `outstanding`: by instance id, the tokens of KV that the requests there need, those of other frontends included.
    `cached`, for `kv`: by instance id, how many leading tokens of this request's prompt have their KV there."""

    def load(instance: Instance) -> float:
        """Relative to what fits its KV cache."""
        return outstanding.get(instance.id, 0.0) / (instance.kv_tokens or 1)

    def cost(instance: Instance) -> tuple[float, float]:
        """The tokens to prefill (the prompt's length is the same everywhere), and a share of those outstanding."""
        return LOAD_WEIGHT * outstanding.get(instance.id, 0.0) - cached.get(instance.id, 0), load(instance)

    match policy:
        case "round-robin":
            return candidates[0]
        case "least-loaded":
            return min(candidates, key=load)
        case "kv":
            return min(candidates, key=cost)
    raise ValueError(f"unknown router {policy!r}")
