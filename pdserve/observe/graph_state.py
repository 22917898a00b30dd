"""The state of the graph now and in the last minutes, from the registry's records and the processes' reports, for the
dashboard and `pdserve status`."""

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
    LostProcess,
    Outage,
    ProcessReport,
    Receipt,
    Tick,
)

BACKLOG_AT = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.FRONTEND}
"""By role: the role whose processes hold its backlog. Prompts wait at decode workers, requests at frontends."""
_ORDER = {"frontend": 0, "decode": 1, "both": 2, "prefill": 3}


class InstanceState(Struct, frozen=True):
    instance: Instance
    load: Load | None
    """None if the process did not respond."""
    links: list[LinkState]


class Moment(Struct, frozen=True):
    """What all frontends served in a tick: rates in 1/s; latencies in seconds, None without observations."""

    age: float
    """Seconds since its end, approximately, because frontends' ticks are not aligned."""
    requests: float
    failed: float
    refused: float
    promised: float
    """Requests with an SLO."""
    kept: float | None
    """Requests that met their SLO; None if no request had an SLO."""
    tokens: float
    ttft_p50: float | None
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None


class GraphState(Struct, frozen=True):
    queue_depth: int
    """Prefill requests not yet pulled: the largest number that a worker reports."""
    queue_limit: int
    """Depth from which decode workers prefill locally; 0: they decide by estimates."""
    instances: list[InstanceState]
    """Frontends first, prefill workers last."""
    slots: list[SlotState]
    cards: dict[str, list[tuple[str, ModelCard]]]
    """By model: id and card of each decode worker, and of each prefill worker that may stand in."""
    settings: dict[str, str]
    moments: list[Moment]
    """The oldest first."""
    receipts: list[Receipt]
    """The newest first: `MAX_REPORTED_RECEIPTS`, then up to `MAX_DETOURS` older ones with a fallback or
    migration."""
    outages: dict[str, list[Outage]]
    """By their reporter: an instance's id, or a name that `pdserve status` gives, such as `the supervisor`."""
    gone: list[LostProcess]
    """Processes whose lease ended without a drain, the newest loss first."""


def graph_state(
    instances: Iterable[Instance],
    slots: Sequence[SlotState],
    cards: Mapping[str, list[tuple[str, ModelCard]]],
    settings: Mapping[str, str],
    watched: Mapping[str, ProcessReport],
) -> GraphState:
    """`watched`: the reports of processes that responded, by instance id or by the name of another reporter. Pure."""
    loads = [reported.load for reported in watched.values()]
    ordered = sorted(instances, key=lambda instance: sort_key(instance.role, instance.id))
    receipts = [receipt for reported in watched.values() for receipt in reported.receipts]
    receipts.sort(key=lambda receipt: receipt.age)
    with_detours = [receipt for receipt in receipts[MAX_REPORTED_RECEIPTS:] if receipt.has_detour]
    return GraphState(
        queue_depth=max((load.queue_depth for load in loads), default=0),
        queue_limit=max((load.queue_limit for load in loads), default=0),
        instances=[_instance(each, watched.get(each.id)) for each in ordered],
        slots=list(slots),
        cards=dict(cards),
        settings=dict(settings),
        moments=moments([reported.ticks for reported in watched.values()]),
        receipts=receipts[:MAX_REPORTED_RECEIPTS] + with_detours[:MAX_DETOURS],
        outages={name: reported.outages for name, reported in watched.items() if reported.outages},
        gone=_gone(watched.values(), {each.id for each in ordered}),
    )


def _gone(watched: Iterable[ProcessReport], there: Container[str]) -> list[LostProcess]:
    by_id = {each.id: each for reported in watched for each in reported.gone if each.id not in there}
    return sorted(by_id.values(), key=lambda each: each.seconds)


def decode_workers(state: GraphState) -> dict[str, int]:
    """By model: the number of registered decode workers; 0 if there are only prefill workers. Pure."""
    workers = Counter(
        each.instance.model for each in state.instances if each.instance.role.includes(Role.DECODE)
    )
    models = {*state.cards, *(each.instance.model for each in state.instances)} - {""}
    return {name: workers[name] for name in sorted(models)}


def backlog(state: GraphState, role: Role) -> float:
    """Seconds that one worker of this role needs for the reported backlog. Pure."""
    reported = (each.load for each in state.instances if each.instance.role.includes(BACKLOG_AT[role]))
    return sum(load.backlog for load in reported if load is not None)


def settings_changed(state: GraphState) -> list[str]:
    """A line for each live setting that differs from the processes' files, or has no effect. Pure."""
    return list_changes(merge_files(each.instance.settings for each in state.instances), state.settings)


def slot_name(instance_id: str) -> str:
    """`decode-0` of `decode-0-eb3bab7a`."""
    return instance_id.rpartition("-")[0] or instance_id


def short_names(ids: Iterable[str]) -> dict[str, str]:
    """By instance id: the name of its slot, or the id if several instances have the same slot. Pure."""
    short = {name: slot_name(name) for name in ids}
    count = Counter(short.values())
    return {name: name if count[slot] > 1 else slot for name, slot in short.items()}


def detours(receipts: Iterable[Receipt]) -> list[tuple[float, Hop, Receipt]]:
    """Migrations and fallbacks with their age in seconds, newest first. Pure."""
    listed = [
        (max(0.0, receipt.age - hop.start), hop, receipt)
        for receipt in receipts
        for hop in receipt.hops
        if hop.name in DETOURS
    ]
    return sorted(listed, key=lambda detour: detour[0])


def moments(series: Iterable[Sequence[Tick]]) -> list[Moment]:
    """Add up the ticks of several frontends, as if their newest ticks were simultaneous. Pure."""
    kept = [ticks for ticks in series if ticks]
    longest = max(map(len, kept), default=0)
    return [
        _moment([ticks[-ago] for ticks in kept if ago <= len(ticks)], (ago - 1) * TICK)
        for ago in range(longest, 0, -1)
    ]


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Seconds below which `share` of the observations lie, as by Prometheus' `histogram_quantile`: linear inside a
    bucket; for the last bucket, its lower bound. Pure."""
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
    """The share of requests that met their SLO, in words; empty if no request had an SLO. Pure."""
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
    """p50 and p95 of all counts, without those of older versions of pdserve, which had other buckets. Cached, because
    each `graph_state` computes the last minutes again."""
    known = [each for each in counts if len(each) == len(BUCKETS) + 1]
    total = list(map(sum, zip(*known, strict=True)))
    return quantile(total, 0.5), quantile(total, 0.95)


def sort_key(role: Role, name: str) -> tuple[int, list[tuple[int, str]]]:
    """Sort key by role, then number: `decode-2` before `decode-10`. Pure."""
    parts = name.split("-")
    return _ORDER[role.value], [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def _instance(instance: Instance, reported: ProcessReport | None) -> InstanceState:
    return InstanceState(instance, reported.load if reported else None, reported.links if reported else [])
