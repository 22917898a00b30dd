"""The problems of a graph, in sentences."""

import pytest
from msgspec.structs import replace

from pdserve.contract.messages import Hop, Load
from pdserve.contract.records import Instance, Role, SlotState
from pdserve.contract.reports import LinkState, LostProcess, Outage, ProcessReport, Receipt, Tick
from pdserve.observe.graph_state import GraphState, graph_state
from pdserve.observe.problems import Node, Problem, duration, nodes, problems, readiness

NOW = 1_700_000_000.0
FRONTEND = Instance("frontend-0-f0", Role.FRONTEND, host="h")
DECODE = [Instance(f"decode-{index}-d{index}", Role.DECODE, "demo", host="h") for index in (0, 1)]
PREFILL = [Instance(f"prefill-{index}-p{index}", Role.PREFILL, "demo", host="h") for index in (0, 1)]
STAND_IN = replace(PREFILL[0], address="tcp://h:1")
PREFILLING_REMOTELY = [replace(each, prefills_remotely=True) for each in DECODE]
ALL = [FRONTEND, *DECODE, *PREFILL]
SLOTS = [
    SlotState(each.id.rpartition("-")[0], each.role, "h", "ready", since=NOW - 1000, end="exit code 0")
    for each in ALL
]
KILLED = SlotState("decode-1", Role.DECODE, "h", "waiting to restart", end="killed by SIGKILL", since=NOW - 4)
FAST = LinkState("prefill-1-p1", "kv", pulls=9, pull_seconds=0.01, bytes_per_second=1e9)


def state(
    loads: dict[str, Load] | None = None,
    links: dict[str, list[LinkState]] | None = None,
    slots: list[SlotState] | None = None,
    receipts: list[Receipt] | None = None,
    ticks: list[Tick] | None = None,
    silent: tuple[str, ...] = (),
    instances: list[Instance] = ALL,
    outages: dict[str, list[Outage]] | None = None,
    gone: list[LostProcess] | None = None,
) -> GraphState:
    watched = {
        each.id: ProcessReport(
            (loads or {}).get(each.id, Load()),
            (links or {}).get(each.id, []),
            ticks or [] if each is FRONTEND else [],
            receipts or [] if each is FRONTEND else [],
            gone=gone or [] if each is FRONTEND else [],
        )
        for each in instances
        if each.id not in silent
    }
    for name, lost in (outages or {}).items():
        watched[name] = replace(watched.get(name, ProcessReport()), outages=lost)
    by_name = {slot.name: slot for slot in [*SLOTS, *(slots or [])]}
    if "none" in by_name:  # no supervisor runs
        by_name = {}
    return graph_state(instances, list(by_name.values()), {}, {}, watched)


def found(state: GraphState) -> list[Problem]:
    return problems(state, nodes(state, NOW))


def node(state: GraphState, name: str) -> Node:
    (found,) = [each for each in nodes(state, NOW) if each.name == name]
    return found


def receipt(age: float, *hops: Hop) -> Receipt:
    return Receipt("r", FRONTEND.id, "/v1/completions", age, 1, hops=[*hops])


LOST = Hop("migration", 3.0, 0.0, "decode-1-d1", "connection lost")
MOVED = receipt(9.0, LOST)


def slow(**changes: object) -> dict[str, list[LinkState]]:
    link = replace(FAST, to="prefill-0-p0", pull_seconds=1.5, bytes_per_second=1.1e8)
    return {"decode-0-d0": [replace(link, **changes), FAST], "decode-1-d1": [FAST]}


WITHOUT_1 = [each for each in ALL if each.id != "decode-1-d1"]


DOWN = "bad: decode-1 is down: killed by SIGKILL"
SILENT = "does not answer: it hangs, or is cut off"
UNSEEN = "processes use the last known topology until it is back (3 s)"
UNREGISTERED = "is not registered: it hangs, or waits for etcd"
STATES = {
    "": state(),
    f"{DOWN}; it failed to start 3 times; it will be started again; 2 requests migrated (4 s)": state(
        slots=[replace(KILLED, failed_starts=3)], receipts=[MOVED, MOVED], instances=WITHOUT_1
    ),
    f"{DOWN}: no memory; it is starting again (4 s)": state(
        slots=[replace(KILLED, state="starting", cause="no memory")], silent=("decode-1-d1",)
    ),
    "warn: decode-1 is ready again after it ended: killed by SIGKILL; 1 request migrated (4 s)": state(
        slots=[replace(KILLED, state="ready", restarts=1)], receipts=[MOVED]
    ),
    "warn: decode-1 lost 1 request: connection lost": state(receipts=[MOVED]),
    "warn: decode-9 is gone: connection lost; 1 request migrated": state(
        receipts=[replace(MOVED, hops=[replace(LOST, instance="decode-9-x")])]
    ),
    "warn: the KV cache of decode-0 is full (98%): requests wait for room\n"
    "info: decode-2 is starting (7 s)\n"
    "info: prefill-1 is draining: it takes no new requests, 1 running request": state(
        loads={"decode-0-d0": Load(kv_usage=0.981), "prefill-1-p1": Load(running=1)},
        slots=[SlotState("decode-2", Role.DECODE, "h", since=NOW - 7)],
        instances=[*ALL[:-1], replace(PREFILL[1], draining=True)],
    ),
    "bad: prefill-1 is stalled: its engine neither replies nor computes, it gets no new requests": state(
        instances=[*ALL[:-1], replace(PREFILL[1], stalled=True)]
    ),
    "bad: no frontend is registered: clients reach nothing": state(
        slots=[SlotState("none", Role.PREFILL)], instances=ALL[1:]
    ),
    "info: frontend-0 is draining: it takes no new requests": state(  # it has left the registry
        slots=[replace(SLOTS[0], state="draining")], instances=ALL[1:]
    ),
    "bad: the prefill queue is full: 12 of 2; prompts are computed at decode workers": state(
        loads={"decode-0-d0": Load(queue_depth=12, queue_limit=2)}
    ),
    "warn: the prefill queue is long: 9 prompts for 2 prefill workers": state(
        loads={"decode-0-d0": Load(queue_depth=9)}
    ),
    f"bad: prefill-0 {SILENT}\n"
    f"bad: prefill-1 {SILENT}\n"
    "bad: 1 prompt in the prefill queue and no prefill worker to take them": state(
        loads={"decode-0-d0": Load(queue_depth=1)}, silent=("prefill-0-p0", "prefill-1-p1")
    ),
    "bad: no prefill worker is available: prompts are computed at decode workers\n"
    "bad: 12 prompts in the prefill queue and no prefill worker to take them\n"
    "warn: prefill-3 of h3 is gone: its lease ended without a drain, and none has replaced it; "
    "1 request migrated (40 s)": state(
        instances=[FRONTEND, *PREFILLING_REMOTELY],
        slots=[SlotState("none", Role.PREFILL)],
        loads={"decode-0-d0": Load(queue_depth=12, queue_limit=2)},
        gone=[LostProcess("prefill-3-p3", "h3", 40.0), LostProcess("decode-0-d9", "h", 50.0)],
        receipts=[replace(MOVED, hops=[replace(LOST, instance="prefill-3-p3")])],
    ),
    f"bad: decode-0 {SILENT}\n"
    f"{DOWN}; it will be started again (4 s)\n"
    "bad: no decode worker is available: requests wait for one until their deadlines; prefill-0, prefill-1 cannot "
    "stand in (no decode worker when they started, or not configured)": state(
        silent=("decode-0-d0",), slots=[KILLED], instances=WITHOUT_1
    ),
    f"bad: decode-0 {SILENT}\n"
    f"bad: decode-1 {UNREGISTERED}\n"
    f"bad: prefill-1 {UNREGISTERED}\n"
    "warn: no decode worker is available: prefill-0 stands in": state(
        silent=("decode-0-d0",), instances=[FRONTEND, DECODE[0], STAND_IN]
    ),
    "bad: no prefill worker of demo is available: prompts are computed at decode workers\n"
    "bad: no decode worker of other is available: requests wait for one until their deadlines; prefill-0 cannot stand "
    "in (no decode worker when they started, or not configured)\n"
    "bad: the prefill queue of other is full: 2 of 2; prompts are computed at decode workers": state(
        instances=[FRONTEND, *PREFILLING_REMOTELY, replace(PREFILL[0], model="other")],
        slots=[SlotState("none", Role.PREFILL)],
        loads={"prefill-0-p0": Load(queue_depth=2, queue_limit=2)},
    ),
    "bad: 0.5 requests/s fail (5xx)\n"
    "bad: 2.5 requests/s are refused (429): more than the workers serve; 7 requests waiting": state(
        ticks=[Tick(requests=10, refused=5, failed=1)], loads={FRONTEND.id: Load(waiting=7)}
    ),
    "bad: KV from prefill-0 to decode-0 is 9 times slower than over the other links (110 MB/s)": state(
        links=slow()
    ),
    "bad: KV from prefill-1 to decode-0 takes 1.5 s for a request (110 MB/s)": state(
        links={"decode-0-d0": [replace(FAST, pull_seconds=1.5, bytes_per_second=1.1e8)]}
    ),
    "bad: decode-0 does not read KV from prefill-1: no answer": state(
        links={"decode-0-d0": [replace(FAST, up=False, failure="no answer")]}
    ),
    "bad: frontend-0 cannot reach decode-0": state(
        links={FRONTEND.id: [LinkState("decode-0-d0", "requests", up=False)]}
    ),
    f"{DOWN}; it will be started again (4 s)": state(
        links={FRONTEND.id: [LinkState("decode-1-d1", "requests", up=False)]},
        slots=[KILLED],
        instances=WITHOUT_1,
    ),
    "bad: NATS at 10.0.0.5:4222 does not answer decode-0, prefill-1: prompts are computed at decode workers until it "
    "is back (12 s)": state(
        outages={
            "decode-0-d0": [Outage("NATS", "10.0.0.5:4222", 11.6)],
            "prefill-1-p1": [Outage("NATS", "10.0.0.5:4222", 12.3)],
        }
    ),
    "bad: NATS at 10.0.0.5:4222 does not serve decode-0, the supervisor (exit code 1: no space): prompts are computed "
    "at decode workers until it does (12 s)": state(
        outages={
            "decode-0-d0": [Outage("NATS", "10.0.0.5:4222", 11.6)],
            "the supervisor": [Outage("NATS", "10.0.0.5:4222", 0.0, "exit code 1: no space")],
        }
    ),
    "bad: etcd does not answer 4 processes: processes use the last known topology until it is back (3 s)": state(
        outages={each.id: [Outage("etcd", "", 3.0)] for each in ALL[:3]}
        | {"this command": [Outage("etcd", "", 1.0)]}
    ),
    f"bad: etcd does not answer decode-0: {UNSEEN}\n"
    "bad: decode-1 does not answer: it is down, or waits for etcd": state(
        outages={"decode-0-d0": [Outage("etcd", "", 3.0)]}, silent=("decode-1-d1",)
    ),
    "warn: 2 remote prefills of the last 30 s failed, and decode workers computed the prompts: "
    "kv-timeout": state(receipts=[receipt(9.0, Hop("fallback", 1.0, why="kv-timeout"))] * 2),
}


@pytest.mark.parametrize("told", STATES)
def test_each_problem_is_a_sentence(told: str) -> None:
    def line(problem: Problem) -> str:
        age = "" if problem.seconds is None else f" ({problem.seconds:.0f} s)"
        return f"{problem.level}: {problem.text}{age}"

    problems = found(STATES[told])
    assert [line(problem) for problem in problems] == told.splitlines()
    assert [each.text for each in problems if each.level == "bad" and not each.advice] == [], (
        "bad, but without advice"
    )


def test_states_within_limits_have_no_problem() -> None:
    """The queue is within its limit. Slow links are unused, or their reads take at most 0.1 s."""
    assert found(state(loads={"decode-0-d0": Load(queue_depth=8)})) == []
    assert found(state(links=slow(pull_seconds=0.1))) == []
    assert found(state(links=slow(pull_seconds=0.045))) == [], "slow, but only 45 ms"
    assert found(state(links=slow(idle=61.0))) == [], "the link is not used"
    unused = replace(FAST, pull_seconds=1.5, idle=61.0)
    assert found(state(links={"decode-0-d0": [unused]})) == []


def test_a_process_is_in_one_state() -> None:
    assert node(state(), "decode-0").state == "ready"
    assert node(state(), "decode-0").seconds == 1000
    assert node(state(slots=[KILLED], silent=("decode-1-d1",)), "decode-1").state == "waiting to restart"
    # decode-1 answers, so the supervisor's record is old
    assert node(state(slots=[KILLED]), "decode-1").state == "ready"
    for silent in (state(silent=("decode-1-d1",)), state(instances=WITHOUT_1)):
        shown = node(silent, "decode-1")  # the supervisor's record still says that it is ready
        assert (shown.state, shown.why, shown.seconds) == ("does not answer", "", None)
    killed = node(state(slots=[KILLED], instances=WITHOUT_1), "decode-1")
    assert (killed.state, killed.why, killed.seconds) == ("waiting to restart", "killed by SIGKILL", 4)


def test_processes_of_one_name_are_shown_with_their_ids() -> None:
    elsewhere = Instance("decode-0-x", Role.DECODE, host="other")
    names = [node.name for node in nodes(state(instances=[*ALL, elsewhere]), NOW)]
    assert names == ["frontend-0", "decode-0-d0", "decode-0-x", "decode-1", "prefill-0", "prefill-1"]
    names = [node.name for node in nodes(state(instances=WITHOUT_1), NOW)]
    assert names == ["frontend-0", "decode-0", "decode-1", "prefill-0", "prefill-1"], "it keeps its position"


def test_further_problems_are_counted() -> None:
    unseen = [Instance(f"prefill-{index}-p", Role.PREFILL, host="h") for index in range(100, 200)]
    told = found(state(instances=[*ALL, *unseen], silent=tuple(each.id for each in unseen)))
    assert len(told) == 12
    assert told[-1] == Problem("bad", "and 89 more problems")


def test_a_process_that_may_not_register_says_why() -> None:
    refused = SlotState(
        "decode-2-d2", Role.DECODE, "h", "refused", cause="pdserve 0.3 (wire 3) cannot work beside"
    )
    shown = [problem for problem in found(state(slots=[refused])) if "decode-2-d2" in problem.about]
    text = "decode-2-d2 is not registered: pdserve 0.3 (wire 3) cannot work beside"
    assert shown == [Problem("bad", text, ["decode-2-d2"])]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00034, "0.3 ms"), (0.0421, "42 ms"), (1.25, "1.2 s"), (119, "119 s"), (121, "2 min"), (7300, "2 h")],
)
def test_durations_are_shown_in_a_fitting_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_slots_of_two_models_on_a_host_are_distinct() -> None:
    other = [Instance(f"decode-{index}-o{index}", Role.DECODE, "other", host="h") for index in (0, 1)]
    demo = [slot if slot.role is Role.FRONTEND else replace(slot, model="demo") for slot in SLOTS]
    slot = SlotState(
        "decode-0", Role.DECODE, "h", "ready", 1, since=NOW - 5, end="exit code 1", model="other"
    )
    shown = {
        node.instance.id: node
        for node in nodes_of(slot, demo=demo, instances=[*ALL, *other])
        if node.instance
    }
    assert (shown["decode-0-d0"].seconds, shown["decode-0-o0"].seconds) == (1000, 5)
    assert shown["decode-1-o1"].seconds is None, "its role runs standalone"
    slot = replace(slot, state="waiting to restart")
    processes = nodes_of(slot, demo=demo, instances=ALL)
    assert [node.name for node in processes if not node.up] == ["decode-0 of other"]
    assert readiness(graph_state(ALL, [], {}, {}, {}), processes)["decode-0", "h"] is False


def test_a_lost_worker_is_gone_despite_a_namesake_of_another_model() -> None:
    told = state(
        slots=[SlotState("none", Role.PREFILL)], gone=[LostProcess("decode-0-o0", "h", 5.0, "other")]
    )
    assert any("decode-0 of h is gone" in problem.text for problem in found(told))
    assert readiness(told, nodes(told, NOW))["decode-0", "h"] is False


def nodes_of(slot: SlotState, *, demo: list[SlotState], instances: list[Instance]) -> list[Node]:
    return nodes(
        graph_state(instances, [*demo, slot], {}, {}, {each.id: ProcessReport() for each in instances}), NOW
    )
