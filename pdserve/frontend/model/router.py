"""Which decode worker gets a request: pure, so that it is tested by tables."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pdserve.records import Instance

LOAD_WEIGHT = 0.1
"""tokens to prefill that one token outstanding at a worker is worth. A request goes where it finds a prefix until that
worker has ten times as many tokens more than another as the prefix saves. Far below 1, because most of what is
outstanding has its KV already and only shares the steps with the new request (decision 0031 has other weights)."""


@dataclass(frozen=True)
class RouterState:
    """What a choice depends on besides the instances themselves."""

    last: str = ""
    """id of the instance chosen last"""
    outstanding: Mapping[str, float] = field(default_factory=dict)
    """by instance id: tokens of KV that the requests there need, those of other frontends included"""
    cached: Mapping[str, int] = field(default_factory=dict)
    """by instance id: leading tokens of this request's prompt whose KV is there; for `kv`"""
    full: Collection[str] = ()
    """ids of the instances without capacity for a further request"""


def eligible(
    instances: Iterable[Instance], avoid: Collection[str] = (), *, only_others: bool = False
) -> list[Instance]:
    """The instances that may get a new request, in order of id; never a draining one. `avoid` names the workers where
    this request failed before: they are left out as long as there is another, or always with `only_others`."""
    candidates = sorted(
        (instance for instance in instances if not instance.draining), key=lambda instance: instance.id
    )
    others = [instance for instance in candidates if instance.id not in avoid]
    return others if others or only_others else candidates


def choose(
    policy: str,
    instances: Iterable[Instance],
    state: RouterState,
    avoid: Collection[str] = (),
    *,
    only_others: bool = False,
) -> Instance | None:
    """An eligible instance, with capacity where there is one; None where none is eligible. Raises ValueError for an
    unknown policy."""
    if policy not in POLICY_FUNCTIONS:
        raise ValueError(f"unknown router {policy!r}; there are {', '.join(POLICY_FUNCTIONS)}")
    candidates = eligible(instances, avoid, only_others=only_others)
    candidates = [instance for instance in candidates if instance.id not in state.full] or candidates
    # Starting behind the last one, so that turns stay fair when instances come and go, and ties are broken in turn.
    start = next((i for i, instance in enumerate(candidates) if instance.id > state.last), 0)
    candidates = candidates[start:] + candidates[:start]
    return POLICY_FUNCTIONS[policy](candidates, state) if candidates else None


def _round_robin(candidates: list[Instance], state: RouterState) -> Instance:
    return candidates[0]


def _least_loaded(candidates: list[Instance], state: RouterState) -> Instance:
    return min(candidates, key=lambda instance: _load(instance, state))


def _load(instance: Instance, state: RouterState) -> float:
    """Relative to what fits its KV cache."""
    return state.outstanding.get(instance.id, 0.0) / (instance.kv_tokens or 1)


def _kv(candidates: list[Instance], state: RouterState) -> Instance:
    """Where it costs least: the tokens still to prefill (the prompt's length is the same everywhere), and a share of
    the tokens outstanding."""

    def cost(instance: Instance) -> tuple[float, float]:
        outstanding, cached = state.outstanding.get(instance.id, 0.0), state.cached.get(instance.id, 0)
        return LOAD_WEIGHT * outstanding - cached, _load(instance, state)

    return min(candidates, key=cost)


POLICY_FUNCTIONS: Mapping[str, Callable[[list[Instance], RouterState], Instance]] = {
    "round-robin": _round_robin,
    "least-loaded": _least_loaded,
    "kv": _kv,
}
"""by the names of `config.schema.POLICIES`; the candidates come in turn, and are never none"""
