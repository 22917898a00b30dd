"""Which decode worker gets a request: pure, so that it is tested by tables."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pdserve.records import Instance


@dataclass(frozen=True)
class RouterState:
    """What a choice depends on besides the instances themselves."""

    last: str = ""
    """id of the instance chosen last"""
    in_flight: Mapping[str, int] = field(default_factory=dict)
    """by instance id: requests that this frontend has there now"""
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


def _load(instance: Instance, state: RouterState) -> tuple[float, float]:
    """Requests at the instance relative to what it can run at once, then its KV usage. The reported load is up to a
    second old and counts the requests of all frontends, the own count is exact but only of this frontend: the larger
    number is nearer."""
    reported = instance.load.running + instance.load.waiting
    requests = max(reported, state.in_flight.get(instance.id, 0))
    return requests / (instance.max_concurrency or 1.0), instance.load.kv_usage


POLICY_FUNCTIONS: Mapping[str, Callable[[list[Instance], RouterState], Instance]] = {
    "round-robin": _round_robin,
    "least-loaded": _least_loaded,
}
"""by the names of `config.schema.POLICIES`; the candidates come in turn, and are never none"""
