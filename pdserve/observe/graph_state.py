"""What the graph is doing now and did in the last minutes, made of the registry's records and of what each process
reports: the same for the dashboard and `pdserve status`."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from msgspec import Struct

from pdserve.contract.live_settings import list_changes, merge_files
from pdserve.contract.messages import Hop, Load
from pdserve.contract.records import Instance, ModelCard, Role, SlotState
from pdserve.contract.reports import (
    BUCKETS,
    DETOURS,
    MAX_DETOURS,
    MAX_REPORTED_RECEIPTS,
    MAX_TICKS,
    TICK,
    LinkState,
    LostWorker,
    Outage,
    ProcessReport,
    Receipt,
    Tick,
)

WAITS = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.FRONTEND}
"""where what waits for a role is: prompts at decode workers, requests at frontends"""
_ORDER = {"frontend": 0, "decode": 1, "both": 2, "prefill": 3}


class InstanceState(Struct, frozen=True):
    instance: Instance
    load: Load | None
    """None: the process did not answer"""
    links: list[LinkState]


class Moment(Struct, frozen=True):
    """What all frontends served in one tick: rates in 1/s; latencies in seconds, None without observations."""

    age: float
    """seconds since its end, approximately: frontends do not tick together"""
    requests: float
    failed: float
    refused: float
    promised: float
    """with a promise to keep"""
    kept: float | None
    """that kept it; None where nothing was promised"""
    tokens: float
    ttft_p50: float | None
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None


class GraphState(Struct, frozen=True):
    queue_depth: int
    """prefill requests not yet pulled: the largest that a worker reports"""
    queue_limit: int
    """depth from which decode workers prefill locally; 0: they decide by estimates"""
    instances: list[InstanceState]
    """frontends first, prefill workers last"""
    slots: list[SlotState]
    cards: dict[str, list[tuple[str, ModelCard]]]
    """by model: (id of a decode worker, or of a prefill worker that may stand in for it, its card)"""
    settings: dict[str, str]
    moments: list[Moment]
    """the oldest first"""
    receipts: list[Receipt]
    """the newest first: `MAX_REPORTED_RECEIPTS`, then up to `MAX_DETOURS` older ones with a detour"""
    outages: dict[str, list[Outage]]
    """by the id of the instance that reports them, or the name of another process that looks at the graph"""
    gone: list[LostWorker]
    """workers that vanished, the last one first"""


def graph_state(
    instances: Iterable[Instance],
    slots: Sequence[SlotState],
    cards: Mapping[str, list[tuple[str, ModelCard]]],
    settings: Mapping[str, str],
    watched: Mapping[str, ProcessReport],
) -> GraphState:
    """`watched`: by instance id, without the processes that did not answer. Pure."""
    loads = [reported.load for reported in watched.values()]
    ordered = sorted(instances, key=lambda instance: place(instance.role, instance.id))
    receipts = [receipt for reported in watched.values() for receipt in reported.receipts]
    receipts.sort(key=lambda receipt: receipt.age)
    astray = [receipt for receipt in receipts[MAX_REPORTED_RECEIPTS:] if receipt.has_detour]
    return GraphState(
        queue_depth=max((load.queue_depth for load in loads), default=0),
        queue_limit=max((load.queue_limit for load in loads), default=0),
        instances=[_instance(each, watched.get(each.id)) for each in ordered],
        slots=list(slots),
        cards=dict(cards),
        settings=dict(settings),
        moments=moments([reported.ticks for reported in watched.values()]),
        receipts=receipts[:MAX_REPORTED_RECEIPTS] + astray[:MAX_DETOURS],
        outages={name: reported.outages for name, reported in watched.items() if reported.outages},
        gone=_gone(watched.values(), {each.id for each in ordered}),
    )


def _gone(watched: Iterable[ProcessReport], there: Container[str]) -> list[LostWorker]:
    by_id = {each.id: each for reported in watched for each in reported.gone if each.id not in there}
    return sorted(by_id.values(), key=lambda each: each.seconds)


def decode_workers(state: GraphState) -> dict[str, int]:
    """By model: how many are registered; 0 where only workers that prefill are left. Pure."""
    workers = Counter(
        each.instance.model for each in state.instances if each.instance.role.includes(Role.DECODE)
    )
    models = {*state.cards, *(each.instance.model for each in state.instances)} - {""}
    return {name: workers[name] for name in sorted(models)}


def backlog(state: GraphState, role: Role) -> float:
    """Seconds that one worker of this role would take for what waits, as `WAITS` of its processes report it. Pure."""
    reported = (each.load for each in state.instances if each.instance.role.includes(WAITS[role]))
    return sum(load.backlog for load in reported if load is not None)


def settings_changed(state: GraphState) -> list[str]:
    """Return a line for each live setting that is not as in the processes' file. Pure."""
    return list_changes(merge_files(each.instance.settings for each in state.instances), state.settings)


def slot_name(instance_id: str) -> str:
    """`decode-0` of `decode-0-eb3bab7a`."""
    return instance_id.rpartition("-")[0] or instance_id


def short_names(ids: Iterable[str]) -> dict[str, str]:
    """By instance id: the name of its slot, or the id itself where several have the same name. Pure."""
    short = {name: slot_name(name) for name in ids}
    count = Counter(short.values())
    return {name: name if count[slot] > 1 else slot for name, slot in short.items()}


def detours(receipts: Iterable[Receipt]) -> list[tuple[float, Hop, Receipt]]:
    """Migrations and fallbacks, each with its age in seconds, the newest first. Pure."""
    listed = [
        (max(0.0, receipt.age - hop.start), hop, receipt)
        for receipt in receipts
        for hop in receipt.hops
        if hop.name in DETOURS
    ]
    return sorted(listed, key=lambda detour: detour[0])


def moments(series: Iterable[Sequence[Tick]]) -> list[Moment]:
    """Add up the ticks of several frontends, taking their newest ones for simultaneous. Pure."""
    kept = [ticks for ticks in series if ticks]
    longest = max(map(len, kept), default=0)
    return [
        _moment([ticks[-ago] for ticks in kept if ago <= len(ticks)], (ago - 1) * TICK)
        for ago in range(longest, 0, -1)
    ]


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Seconds within which `share` of the observations lie, as Prometheus' `histogram_quantile` has it: linear inside a
    bucket; in the last one, which has no upper bound, its lower bound. Pure."""
    below = list(accumulate(counts))
    if not below or not below[-1]:
        return None
    rank = share * below[-1]
    index = bisect_left(below, rank)
    lower = BUCKETS[index - 1] if index else 0.0
    if index == len(BUCKETS):
        return lower
    return lower + (BUCKETS[index] - lower) * (1 - (below[index] - rank) / counts[index])


def promise_kept(series: Sequence[Moment]) -> str:
    """Return the share of requests that kept their promise, in words; empty where nothing was promised. Pure."""
    promised = sum(moment.promised for moment in series)
    kept = sum(moment.kept or 0.0 for moment in series)
    lately = f"{round(promised * TICK)} requests in the last {len(series) * TICK / 60:.0f} minutes"
    return f"kept by {kept / promised:.1%} of {lately}" if promised else ""


def _moment(ticks: Sequence[Tick], age: float) -> Moment:
    promised = sum(tick.promised for tick in ticks) / TICK
    return Moment(
        age,
        sum(tick.requests for tick in ticks) / TICK,
        sum(tick.failed for tick in ticks) / TICK,
        sum(tick.refused for tick in ticks) / TICK,
        promised,
        sum(tick.kept for tick in ticks) / TICK if promised else None,
        sum(tick.tokens for tick in ticks) / TICK,
        *_quantiles(tuple(tuple(tick.ttft) for tick in ticks)),
        *_quantiles(tuple(tuple(tick.itl) for tick in ticks)),
    )


@lru_cache(8 * MAX_TICKS)
def _quantiles(counts: tuple[tuple[int, ...], ...]) -> tuple[float | None, float | None]:
    """p50 and p95 of all together, without frontends of another version of pdserve, which have other buckets. Cached:
    each look at the graph asks again for the ticks of the last minutes."""
    known = [each for each in counts if len(each) == len(BUCKETS) + 1]
    total = list(map(sum, zip(*known, strict=True)))
    return quantile(total, 0.5), quantile(total, 0.95)


def place(role: Role, name: str) -> tuple[int, list[tuple[int, str]]]:
    """A sort key by role, then number: `decode-2` before `decode-10`. Pure."""
    parts = name.split("-")
    return _ORDER[role.value], [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def _instance(instance: Instance, reported: ProcessReport | None) -> InstanceState:
    return InstanceState(instance, reported.load if reported else None, reported.links if reported else [])
