"""The current problems of a graph, a sentence for each (`problems`), and the state of each of its processes (`nodes`),
for the dashboard and `pdserve status`. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from pdserve.contract.messages import Load
from pdserve.contract.records import REFUSED, Instance, Role, SlotState
from pdserve.contract.reports import LinkState, LostProcess, Receipt
from pdserve.observe.graph_state import GraphState, decode_workers, detours, short_names, slot_name, sort_key

RECENT_SECONDS = 30.0
"""Seconds for which a migration, a fallback, or the end of a process that is ready again is reported."""
RATE_TICKS = 5
"""Ticks over which the rates of refused and failed requests are averaged."""
SLOW_FACTOR = 4.0
"""A link is slow if its bytes per second are below the median of the other links by this factor, and its seconds per
request are above their median by half this factor. Unusually short or long prompts cause only one of the two."""
MIN_SLOW_PULL = 0.25
"""Minimum of seconds per request of a link that is reported as slow."""
MAX_IDLE = 60.0
"""Seconds without a read after which a link is no longer reported as slow."""
SLOW_PULL = 1.0
"""Seconds per request above which a graph's only link is reported as slow."""
SLOW_ROUND_TRIP = 0.25
"""Seconds of a heartbeat's round trip above which a link is reported as slow."""
MAX_PROBLEMS = 12
"""Maximum length of a list of problems."""
FULL = 0.97
"""Share of the KV blocks in use from which on a KV cache is reported as full."""

_NO_STAND_IN = "cannot stand in (no decode worker when they started, or not configured)"
_WITHOUT_QUEUE = "prompts are computed at decode workers"
_LOG, _TRACE = "see its log", "`pdserve trace` lists them"
_SERVER = "start it, or repair the network to it"
_DECODE, _PREFILL = "start decode workers", "start prefill workers"
_NETWORK = "`pdserve doctor` on their hosts says what is closed or slow"
_WITHOUT_REGISTRY = "processes use the last known topology"

READY, DRAINING, SILENT, STARTING = "ready", "draining", "does not answer", "starting"
STALLED = "stalled"


class Node(Struct, frozen=True):
    """A process that is registered, or that its supervisor keeps alive."""

    name: str
    """Name of its slot, as `decode-0`; its instance id if several processes have the same slot."""
    role: Role
    state: str
    """`ready`, `draining`, `stalled`, `does not answer`, or a state of its slot (`SlotState`)."""
    why: str = ""
    """Its last exit, and its last error or line of output before that."""
    seconds: float | None = None
    """Seconds since its last change to or from ready; None without a supervisor."""
    restarts: int = 0
    failed_starts: int = 0
    """Since it was last ready."""
    host: str = ""
    model: str = ""
    """Model of a worker, if its slot or instance names it."""
    instance: Instance | None = None
    load: Load | None = None
    links: list[LinkState] = []

    @property
    def up(self) -> bool:
        return self.state in (READY, DRAINING)


class Problem(Struct, frozen=True):
    level: str
    """`bad`: requests fail, or a part is down; `warn`: less than that, or it is over; `info`: no problem."""
    text: str
    """A sentence without a full stop."""
    about: list[str] = []
    """Names of nodes or slots, or `queue`; of a link both ends."""
    seconds: float | None = None
    """Seconds that the problem has lasted; None if unknown."""
    advice: str = ""
    """What the operator can do; empty if the problem passes by itself, or the text says it."""


def nodes(state: GraphState, now: float) -> list[Node]:
    """The processes, sorted by role and number. `now`: Unix seconds."""
    slots = {(slot.name, slot.host, slot.model): slot for slot in state.slots}
    names = short_names(each.instance.id for each in state.instances)
    listed = []
    for each in state.instances:
        instance, name = each.instance, slot_name(each.instance.id)
        found = [key for model in (instance.model, "") if (key := (name, instance.host, model)) in slots]
        slot = slots.pop(found[0]) if found else None
        node = _node(slot, now) if slot else Node(name, instance.role, READY)
        if each.load is not None:
            word = STALLED if instance.stalled else DRAINING if instance.draining else READY
            node = replace(node, state=word)
        elif node.state == READY:
            node = _silent(node)
        shown, reported = names[instance.id], {"load": each.load, "links": each.links}
        where = {"host": instance.host, "model": instance.model}
        listed.append(replace(node, name=shown, instance=instance, **where, **reported))
    taken = {node.name for node in listed}
    for node in (_node(slot, now) for slot in slots.values()):
        name = f"{node.name} of {node.model}" if node.model and node.name in taken else node.name
        listed.append(replace(_silent(node) if node.state == READY else node, name=name))
    return sorted(listed, key=lambda node: sort_key(node.role, node.name))


def readiness(state: GraphState, processes: Sequence[Node]) -> dict[tuple[str, str], bool]:
    """By slot and host: whether the slot's processes of all models are ready. Draining processes are left out. Lost
    processes that no other has replaced count as not ready. `processes`: the state's `nodes`."""
    found = {_place(node): node.state == READY for node in processes if node.state != DRAINING}
    found |= {
        (slot_name(each.id), each.host, each.model): False
        for each in state.gone
        if not _is_replaced(each, processes)
    }
    return {place[:2]: ready for place, ready in sorted(found.items(), key=lambda each: not each[1])}


def problems(state: GraphState, processes: Sequence[Node]) -> list[Problem]:
    """The problems, worst first. `processes`: the state's `nodes`."""
    etcd_away = any(outage.server == "etcd" for outages in state.outages.values() for outage in outages)
    listed = [
        *_outages(state, processes),
        *_processes(processes, _lost(state.receipts), state.gone, etcd_away),
        *_without_frontend(processes),
        *_of_each_model(state, processes),
        *_requests(state, processes),
        *_links(processes),
        *_fallbacks(state.receipts),
    ]
    listed.sort(key=lambda problem: ("bad", "warn", "info").index(problem.level))
    if len(listed) > MAX_PROBLEMS:
        more = f"and {len(listed) - MAX_PROBLEMS + 1} more problems"
        listed[MAX_PROBLEMS - 1 :] = [Problem(listed[MAX_PROBLEMS - 1].level, more)]
    return listed


def _node(slot: SlotState, now: float) -> Node:
    why = ": ".join(filter(None, (slot.end, slot.cause)))
    seconds = max(0.0, now - slot.since) if slot.since else None
    ends = slot.restarts, slot.failed_starts
    return Node(slot.name, slot.role, slot.state, why, seconds, *ends, slot.host, slot.model)


def _place(node: Node) -> tuple[str, str, str]:
    """The slot, host and model of a process."""
    slot = slot_name(node.instance.id) if node.instance else node.name.partition(" of ")[0]
    return slot, node.host, node.model


def _is_replaced(gone: LostProcess, processes: Iterable[Node]) -> bool:
    """Whether a process has the slot, host and model of the lost process. Old versions of pdserve report no model."""
    slot, host = slot_name(gone.id), gone.host
    models = {place[2] for node in processes if (place := _place(node))[:2] == (slot, host)}
    return bool(models) and (not gone.model or not models.isdisjoint((gone.model, "")))


def _silent(node: Node) -> Node:
    """The node without its supervisor's reports, which do not explain why it is silent."""
    return replace(node, state=SILENT, why="", seconds=None)


def _outages(state: GraphState, processes: Sequence[Node]) -> Iterator[Problem]:
    by_id = {node.instance.id: node for node in processes if node.instance}
    lost: defaultdict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    whys: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for watcher, outages in state.outages.items():
        node = by_id.get(watcher)
        for outage in outages:
            without = _WITHOUT_QUEUE if outage.server == "NATS" else _WITHOUT_REGISTRY
            lost[outage.server, outage.address, without][node.name if node else watcher] = outage.seconds
            whys[outage.server, outage.address, without] |= {outage.why} - {""}
    for (server, address, without), seconds in lost.items():
        at = f" at {address}" if address else ""
        whom = ", ".join(seconds) if len(seconds) <= 3 else f"{len(seconds)} processes"
        why = "; ".join(sorted(whys[server, address, without]))
        text = f"{server}{at} does not {'serve' if why else 'answer'} {whom}{f' ({why})' * bool(why)}: {without} until "
        text += "it does" if why else "it is back"
        yield Problem("bad", text, ["queue"] * (without is _WITHOUT_QUEUE), max(seconds.values()), _SERVER)


def _why_silent(node: Node, etcd_away: bool) -> str:
    if node.instance is None:
        return "is not registered: it hangs, or waits for etcd"
    return f"does not answer: it {'is down, or waits for etcd' if etcd_away else 'hangs, or is cut off'}"


def _processes(
    processes: Sequence[Node], lost: Mapping[str, list[str]], gone: Iterable[LostProcess], etcd_away: bool
) -> Iterator[Problem]:
    """`lost`: by slot, the reasons of recent migrations from its worker. Slots without a process are reported last."""
    left = dict(lost)
    for node in processes:
        if problem := _process(node, left.pop(_place(node)[0], []), etcd_away):
            yield problem
        if node.load is not None and node.load.kv_usage >= FULL:
            full = f"the KV cache of {node.name} is full ({node.load.kv_usage:.0%}): requests wait for room"
            yield Problem("warn", full, [node.name], advice=_DECODE)
    for each in gone:
        if not _is_replaced(each, processes):
            name = slot_name(each.id)
            at = f" of {each.host}" if each.host else ""
            text = f"{name}{at} is gone: its lease ended without a drain, and none has replaced it"
            yield Problem("warn", text + _moved(left.pop(name, [])), [name], each.seconds, _LOG)
    for name, why_lost in left.items():
        yield Problem("warn", f"{name} is gone: {_most(why_lost)}{_moved(why_lost)}", [name])


def _process(node: Node, why_lost: Sequence[str], etcd_away: bool) -> Problem | None:
    name, moved = node.name, _moved(why_lost)
    if node.state == SILENT:
        return Problem("bad", f"{name} {_why_silent(node, etcd_away)}{moved}", [name], advice=_LOG)
    if node.state == STALLED:
        text = f"{name} is stalled: its engine neither replies nor computes, it gets no new requests{moved}"
        return Problem("bad", text, [name], advice=_LOG)
    if node.state == DRAINING:
        running = f", {count(node.load.running, 'running request')}" if node.load else ""
        return Problem("info", f"{name} is draining: it takes no new requests{running}{moved}", [name])
    if node.state == STARTING and not node.why:
        return Problem("info", f"{name} is starting", [name], node.seconds)
    if node.state == REFUSED:
        return Problem("bad", f"{name} is not registered: {node.why}", [name])
    if not node.up:
        next_ = {STARTING: "; it is starting again", "waiting to restart": "; it will be started again"}
        failed = f"; it failed to start {count(node.failed_starts, 'time')}" if node.failed_starts else ""
        text = f"{name} is down: {node.why or node.state}{failed}{next_.get(node.state, '')}{moved}"
        return Problem("bad", text, [name], node.seconds, _LOG)
    if node.restarts and node.seconds is not None and node.seconds < RECENT_SECONDS:
        return Problem(
            "warn", f"{name} is ready again after it ended: {node.why}{moved}", [name], node.seconds
        )
    if why_lost:
        return Problem("warn", f"{name} lost {count(len(why_lost), 'request')}: {_most(why_lost)}", [name])
    return None


def _without_frontend(processes: Sequence[Node]) -> Iterator[Problem]:
    if processes and not any(node.role is Role.FRONTEND for node in processes):
        yield Problem("bad", "no frontend is registered: clients reach nothing", advice="start a frontend")


def _of_each_model(state: GraphState, processes: Sequence[Node]) -> Iterator[Problem]:
    """Problems of each model, with its name if there are several models."""
    models = {*decode_workers(state), *(each.model for each in state.gone)} - {""} or {""}
    for model in sorted(models) if processes else ():
        workers = [node for node in processes if node.instance and node.instance.model == model]
        of = f" of {model}" * (len(models) > 1)
        yield from _missing(workers, of)
        yield from _queue([node.load for node in workers if node.load], _ready(workers, Role.PREFILL), of)


def _ready(workers: Sequence[Node], role: Role) -> int:
    return sum(node.state == READY and node.role.includes(role) for node in workers)


def _missing(workers: Sequence[Node], of: str) -> Iterator[Problem]:
    if not _ready(workers, Role.DECODE):
        ready = [node for node in workers if node.state == READY]
        names = [node.name for node in ready if node.instance and node.instance.is_stand_in]
        if names:
            stand = "stands in" if len(names) == 1 else "stand in"
            text = f"no decode worker{of} is available: {', '.join(names)} {stand}"
            yield Problem("warn", text, names, advice=_DECODE)
        else:
            idle = [node.name for node in ready if node.role is Role.PREFILL]
            text = f"no decode worker{of} is available: requests wait for one until their deadlines"
            if idle:
                text += f"; {', '.join(idle)} {_NO_STAND_IN}"
            yield Problem("bad", text, advice=_DECODE)
    elif not _ready(workers, Role.PREFILL) and any(
        node.instance and node.instance.prefills_remotely for node in workers
    ):
        yield Problem("bad", f"no prefill worker{of} is available: {_WITHOUT_QUEUE}", advice=_PREFILL)


def _queue(loads: Sequence[Load], prefill: int, of: str) -> Iterator[Problem]:
    depth = max((load.queue_depth for load in loads), default=0)
    limit = max((load.queue_limit for load in loads), default=0)
    if depth and not prefill:
        text = f"{count(depth, 'prompt')} in the prefill queue{of} and no prefill worker to take them"
        yield Problem("bad", text, ["queue"], advice=_PREFILL)
    elif limit and depth >= limit:
        text = f"the prefill queue{of} is full: {depth} of {limit}; {_WITHOUT_QUEUE}"
        yield Problem("bad", text, ["queue"], advice=_PREFILL)
    elif not limit and depth > 4 * prefill:
        text = (
            f"the prefill queue{of} is long: {count(depth, 'prompt')} for {count(prefill, 'prefill worker')}"
        )
        yield Problem("warn", text, ["queue"], advice=_PREFILL)


def _requests(state: GraphState, processes: Sequence[Node]) -> Iterator[Problem]:
    recent = state.moments[-RATE_TICKS:]
    if not recent:
        return
    refused = sum(moment.refused for moment in recent) / len(recent)
    failed = sum(moment.failed for moment in recent) / len(recent)
    frontends = [node for node in processes if node.role is Role.FRONTEND]
    waiting = sum(node.load.waiting for node in frontends if node.load)
    if failed:
        yield Problem("bad", f"{failed:.1f} requests/s fail (5xx)", advice="see the frontends' log")
    if refused:
        line = f"; {count(waiting, 'request')} waiting" if waiting else ""
        text = f"{refused:.1f} requests/s are refused (429): more than the workers serve{line}"
        yield Problem("bad", text, advice=_DECODE)


def _links(processes: Sequence[Node]) -> Iterator[Problem]:
    names = {node.instance.id: node.name for node in processes if node.instance}
    down = {node.name for node in processes if not node.up}
    links = [
        (node.name, names.get(link.to, slot_name(link.to)), link)
        for node in processes
        if node.up
        for link in node.links
    ]
    for source, target, link in links:
        if target in down:
            continue  # the process is a problem already
        why = f": {link.failure}" if link.failure else ""
        if not link.up and link.kind == "kv":
            yield Problem(
                "bad", f"{source} does not read KV from {target}{why}", [source, target], advice=_NETWORK
            )
        elif not link.up:
            yield Problem("bad", f"{source} cannot reach {target}{why}", [source, target], advice=_NETWORK)
        elif link.round_trip is not None and link.round_trip > SLOW_ROUND_TRIP:
            text = f"{source} waits {duration(link.round_trip)} for a heartbeat's answer from {target}"
            yield Problem("warn", text, [source, target], advice=_NETWORK)
    read = [each for each in links if each[2].kind == "kv" and each[2].pulls and each[2].bytes_per_second]
    for source, target, link in read:
        if link.idle > MAX_IDLE or (link.pull_seconds or 0.0) < MIN_SLOW_PULL:
            continue
        if (factor := _slower(link, [other for _, _, other in read if other is not link])) >= SLOW_FACTOR:
            text = f"KV from {target} to {source} is {factor:.0f} times slower than over the other links"
        elif len(read) == 1 and (link.pull_seconds or 0.0) > SLOW_PULL:
            text = f"KV from {target} to {source} takes {duration(link.pull_seconds or 0.0)} for a request"
        else:
            continue
        text += f" ({(link.bytes_per_second or 0.0) / 1e6:,.3g} MB/s)"
        yield Problem("bad", text, [source, target], advice=_NETWORK)


def _slower(link: LinkState, others: Sequence[LinkState]) -> float:
    """The factor by which the link's bytes per second are below the median of `others`; 0 if its seconds per request
    are not far above their median."""
    if not others or not link.bytes_per_second:
        return 0.0
    factor = median(other.bytes_per_second or 0.0 for other in others) / link.bytes_per_second
    usual = median(other.pull_seconds or 0.0 for other in others)
    return factor if (link.pull_seconds or 0.0) >= usual * SLOW_FACTOR / 2 else 0.0


def _lost(receipts: Iterable[Receipt]) -> dict[str, list[str]]:
    """By slot: the reasons of recent migrations from its worker, also of requests that still run."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for age, hop, _ in detours(receipts):
        if hop.name == "migration" and age < RECENT_SECONDS:
            reasons[slot_name(hop.instance)].append(hop.why)
    return reasons


def _moved(why_lost: Sequence[str]) -> str:
    """The number of migrated requests, as the end of a sentence."""
    return f"; {count(len(why_lost), 'request')} migrated" if why_lost else ""


def _fallbacks(receipts: Sequence[Receipt]) -> Iterator[Problem]:
    reasons = [
        hop.why for age, hop, _ in detours(receipts) if hop.name == "fallback" and age < RECENT_SECONDS
    ]
    if reasons:
        failed = f"{count(len(reasons), 'remote prefill')} of the last {RECENT_SECONDS:.0f} s failed"
        text = f"{failed}, and decode workers computed the prompts: {_most(reasons)}"
        yield Problem("warn", text, advice=_TRACE)


def _most(reasons: Iterable[str]) -> str:
    return Counter(reasons).most_common(1)[0][0]


def count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """The time in ms, s, min or h."""
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
