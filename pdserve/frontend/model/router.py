"""Which decode worker gets a request: pure, so that it is tested by tables."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pdserve.config.schema import POLICIES
from pdserve.messages import Instance


@dataclass(frozen=True)
class RouterState:
    """What a choice depends on besides the instances themselves."""

    last: str = ""
    """id of the instance chosen last"""
    in_flight: Mapping[str, int] = field(default_factory=dict)
    """by instance id: requests that this frontend has there now"""


def eligible(
    instances: Iterable[Instance], avoid: Collection[str] = (), *, only_others: bool = False
) -> list[Instance]:
    """Those that may get a new request, in order of id; never a draining one. `avoid` names the workers
    where this request failed before: they are left out as long as there is another, or always with
    `only_others`."""
    takers = sorted((one for one in instances if not one.draining), key=lambda one: one.id)
    others = [one for one in takers if one.id not in avoid]
    return others if others or only_others else takers


def choose(policy: str, instances: list[Instance], state: RouterState) -> Instance | None:
    """One of `instances` (in order of id), or None where there are none. Raises ValueError for an unknown
    policy."""
    if policy not in POLICIES:
        raise ValueError(f"unknown router {policy!r}; there are {', '.join(POLICIES)}")
    takers = eligible(instances)
    if not takers:
        return None
    if policy == "least-loaded":
        return min(_after(takers, state.last), key=lambda one: _pressure(one, state))
    return _after(takers, state.last)[0]


def _after(instances: list[Instance], last: str) -> list[Instance]:
    """Starting behind `last`, so that turns stay fair when instances come and go, and ties are broken in
    turn."""
    start = next((i for i, one in enumerate(instances) if one.id > last), 0)
    return instances[start:] + instances[:start]


def _pressure(instance: Instance, state: RouterState) -> tuple[float, float]:
    """Requests at the instance relative to what it can run at once, then its KV usage. The reported load is
    up to a second old and counts everybody's requests, the own count is exact but only ours: the larger one
    is nearer."""
    reported = instance.load.running + instance.load.waiting
    requests = max(reported, state.in_flight.get(instance.id, 0))
    return requests / (instance.max_concurrency or 1.0), instance.load.kv_usage
