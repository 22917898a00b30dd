"""What the graph is doing now and did in the last minutes, put together from the registry and from what each process
tells of itself: the same for the dashboard, `pdserve status` and `pdserve trace`."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from msgspec import Struct

from pdserve.messages import Hop, Load
from pdserve.records import Instance, ModelCard, Role, SlotState
from pdserve.watch import (
    BUCKETS,
    DETOURS,
    MAX_ASTRAY,
    MAX_TICKS,
    MAX_TOLD,
    TICK,
    LinkState,
    Outage,
    Receipt,
    Tick,
    Watched,
)

_ORDER = {"frontend": 0, "decode": 1, "both": 2, "prefill": 3}


class InstanceState(Struct, frozen=True):
    instance: Instance
    load: Load | None
    """None: it did not answer"""
    links: list[LinkState]


class Moment(Struct, frozen=True):
    """What all frontends served in one tick: rates in 1/s, latencies in seconds, None where there were none."""

    age: float
    """seconds since its end, about: frontends do not tick together"""
    requests: float
    failed: float
    refused: float
    tokens: float
    ttft_p50: float | None
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None


class GraphState(Struct, frozen=True):
    queue_depth: int
    """prefill requests not yet pulled: all workers see the same queue, at slightly different times"""
    queue_limit: int
    """at which decode workers prefill locally; 0: by estimates, without a limit"""
    instances: list[InstanceState]
    """frontends first, prefill workers last"""
    slots: list[SlotState]
    cards: dict[str, list[tuple[str, ModelCard]]]
    """by model: (id of the decode worker, its card)"""
    settings: dict[str, str]
    moments: list[Moment]
    """the oldest first"""
    receipts: list[Receipt]
    """the newest first: `MAX_TOLD`, and `MAX_ASTRAY` of those before them that went astray"""
    outages: dict[str, list[Outage]]
    """by the id of the instance that tells them, or by the name of another process that looks at the graph"""


def graph_state(
    instances: Iterable[Instance],
    slots: Sequence[SlotState],
    cards: Mapping[str, list[tuple[str, ModelCard]]],
    settings: Mapping[str, str],
    watched: Mapping[str, Watched],
) -> GraphState:
    """`watched`: by instance id; a process that did not answer is not in it. Pure."""
    loads = [told.load for told in watched.values()]
    receipts = [receipt for told in watched.values() for receipt in told.receipts]
    receipts.sort(key=lambda receipt: receipt.age)
    astray = [receipt for receipt in receipts[MAX_TOLD:] if receipt.astray]
    return GraphState(
        queue_depth=max((load.queue_depth for load in loads), default=0),
        queue_limit=max((load.queue_limit for load in loads), default=0),
        instances=[_instance(instance, watched.get(instance.id)) for instance in in_order(instances)],
        slots=list(slots),
        cards=dict(cards),
        settings=dict(settings),
        moments=moments([told.ticks for told in watched.values()]),
        receipts=receipts[:MAX_TOLD] + astray[:MAX_ASTRAY],
        outages={name: told.outages for name, told in watched.items() if told.outages},
    )


def in_order(instances: Iterable[Instance]) -> list[Instance]:
    return sorted(instances, key=lambda instance: place(instance.role, instance.id))


def slot_name(instance_id: str) -> str:
    """`decode-0` of `decode-0-eb3bab7a`."""
    return instance_id.rpartition("-")[0] or instance_id


def short_names(ids: Iterable[str]) -> dict[str, str]:
    """Their slots' names, where only one of them would be called so. Pure."""
    short = {name: slot_name(name) for name in ids}
    often = Counter(short.values())
    return {name: name if often[called] > 1 else called for name, called in short.items()}


def detours(receipts: Iterable[Receipt]) -> list[tuple[float, Hop, Receipt]]:
    """Requests that did not go the way that was meant for them: migrations and fallbacks, each with its age in seconds,
    the newest first. Pure."""
    found = [
        (max(0.0, receipt.age - hop.start), hop, receipt)
        for receipt in receipts
        for hop in receipt.hops
        if hop.name in DETOURS
    ]
    return sorted(found, key=lambda detour: detour[0])


def moments(series: Iterable[Sequence[Tick]]) -> list[Moment]:
    """Of several frontends, whose newest ticks are taken for simultaneous. Pure."""
    kept = [ticks for ticks in series if ticks]
    longest = max(map(len, kept), default=0)
    return [
        _moment([ticks[-ago] for ticks in kept if ago <= len(ticks)], (ago - 1) * TICK)
        for ago in range(longest, 0, -1)
    ]


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Seconds that `share` of the observations took at most, linear inside a bucket of `BUCKETS`; of the last, which
    has no upper bound, its lower one. As Prometheus' `histogram_quantile`. Pure."""
    below = list(accumulate(counts))
    if not below or not below[-1]:
        return None
    rank = share * below[-1]
    index = bisect_left(below, rank)
    lower = BUCKETS[index - 1] if index else 0.0
    if index == len(BUCKETS):
        return lower
    return lower + (BUCKETS[index] - lower) * (1 - (below[index] - rank) / counts[index])


def _moment(ticks: Sequence[Tick], age: float) -> Moment:
    return Moment(
        age,
        sum(tick.requests for tick in ticks) / TICK,
        sum(tick.failed for tick in ticks) / TICK,
        sum(tick.refused for tick in ticks) / TICK,
        sum(tick.tokens for tick in ticks) / TICK,
        *_quantiles(tuple(tuple(tick.ttft) for tick in ticks)),
        *_quantiles(tuple(tuple(tick.itl) for tick in ticks)),
    )


@lru_cache(8 * MAX_TICKS)
def _quantiles(counts: tuple[tuple[int, ...], ...]) -> tuple[float | None, float | None]:
    """p50 and p95 of all of them, without those of another version of pdserve, which has other buckets. The ticks of
    before are looked at each second."""
    known = [each for each in counts if len(each) == len(BUCKETS) + 1]
    total = list(map(sum, zip(*known, strict=True)))
    return quantile(total, 0.5), quantile(total, 0.95)


def place(role: Role, name: str) -> tuple[int, list[tuple[int, str]]]:
    """`decode-2` is before `decode-10`. Pure."""
    parts = name.split("-")
    return _ORDER[role.value], [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def _instance(instance: Instance, told: Watched | None) -> InstanceState:
    return InstanceState(instance, told.load if told else None, told.links if told else [])
