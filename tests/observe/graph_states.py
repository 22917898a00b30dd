"""Graph states for tests of `observe`."""

from msgspec.structs import replace

from pdserve.contract.messages import Hop, Load
from pdserve.contract.records import Instance, ModelCard, Role, SlotState
from pdserve.contract.reports import BUCKETS, LinkState, ProcessReport, Receipt, Tick
from pdserve.observe.graph_state import GraphState, graph_state

NOW = 1_800_000_000.0
SLOW = Receipt(
    "ecba9d010be2479097e4823fc043fbec",
    "frontend-0-aa",
    "/v1/chat/completions",
    age=62.0,
    seconds=2.0,
    model="demo",
    key="alice",
    status=200,
    prefill="remote",
    reason="threshold",
    prompt_tokens=412,
    cached_tokens=32,
    output_tokens=24,
    ttft=1.2,
    retries=1,
    instances=["decode-1-dd", "decode-0-cc"],
    hops=[
        Hop("admission", 0.0, 0.2),
        Hop("queue", 0.2, 0.3, "prefill-1-ff"),
        Hop("prefill", 0.5, 0.5, "prefill-1-ff"),
        Hop("transfer", 1.0, 0.1, "prefill-1-ff"),
        Hop("first-step", 1.1, 0.004, "decode-1-dd"),
        Hop("decode", 1.2, 0.3, "decode-1-dd"),
        Hop("migration", 1.5, 0.0, "decode-1-dd", "decode-1-dd is gone"),
        Hop("decode", 1.6, 0.4, "decode-0-cc"),
    ],
)
FELL = replace(
    SLOW,
    request_id="b0000000000000000000000000000000",
    frontend="frontend-1-bb",
    age=5.0,
    running=True,
    prefill="local",
    reason="timeout",
    hops=[Hop("fallback", 2.5, 0.0, "decode-0-cc", "no prefill worker took it within 2.5 s")],
)


def instance(name: str, pid: int) -> Instance:
    role = Role(name.partition("-")[0])
    works = {"model": "demo", "kv_blocks": 2048, "kv_tokens": 65536} if role is not Role.FRONTEND else {}
    return Instance(name, role, host="127.0.0.1", pid=pid, address=f"tcp://127.0.0.1:{pid}", **works)  # type: ignore[arg-type]


def histogram(bucket: int) -> list[int]:
    return [3 * (index == bucket) + (index == bucket + 4) for index in range(len(BUCKETS) + 1)]


def loaded(down: bool = False, slow: bool = False, full: bool = False) -> GraphState:
    """Two frontends, two decode and two prefill workers. `down`: decode-1 is down; `slow`: KV from prefill-1 is slow;
    `full`: the prefill queue is full."""
    frontends = [instance("frontend-0-aa", 1), instance("frontend-1-bb", 2)]
    decode = [instance("decode-0-cc", 10), instance("decode-1-dd", 11)]
    prefill = [instance("prefill-0-ee", 500), instance("prefill-1-ff", 501)]
    watched = {}
    for frontend in frontends:
        links = [LinkState(worker.id, "requests", requests=2, round_trip=0.0003) for worker in decode]
        ticks = [
            Tick(3, 0, 0, 120, histogram(8 + number % 6), histogram(3 + number % 3)) for number in range(60)
        ]
        receipts = [SLOW] if frontend is frontends[0] else [FELL]
        watched[frontend.id] = ProcessReport(Load(running=4), links, ticks, receipts)
    for number, worker in enumerate(decode):
        links = [
            LinkState(each.id, "kv", pulls=40, pull_seconds=0.02, bytes_per_second=8e8, requests=1)
            for each in prefill
        ]
        if slow:
            links[1] = LinkState(prefill[1].id, "kv", True, 1, None, 12, 1.5, 2e6, 2, "the read stalled")
        load = Load(2 + number, 1, 0.1 + 0.4 * number, queue_depth=10 if full else 1, queue_limit=10)
        watched[worker.id] = ProcessReport(load, links)
    watched |= {worker.id: ProcessReport(Load(1, 0, 0.3)) for worker in prefill}
    instances = [*frontends, *decode, *prefill]
    slots = [
        SlotState(each.id.rpartition("-")[0], each.role, each.host, "ready", since=NOW - 700)
        for each in instances
    ]
    if down:
        del watched[decode[1].id]
        instances.remove(decode[1])
        slots[3] = SlotState(
            "decode-1", Role.DECODE, "127.0.0.1", "waiting to restart", 2, 0, "killed by SIGKILL", "", NOW - 3
        )
    cards = {
        "demo": [(worker.id, ModelCard("demo", "/models/demo")) for worker in decode if worker in instances]
    }
    return graph_state(instances, slots, cards, {"router": "kv"}, watched)
