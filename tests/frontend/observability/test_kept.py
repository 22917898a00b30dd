"""Whether promises were kept: in receipts, in metrics and in the dashboard's share of kept promises."""

import pytest

from pdserve.contract.messages import Failed, Hop
from pdserve.contract.reports import Receipt, Tick
from pdserve.contract.slo import NO_SLO, SloTargets
from pdserve.frontend.edge.request_record import receipt_of
from pdserve.frontend.edge.request_state import RequestState
from pdserve.frontend.edge.response import ResponseWriter
from pdserve.observe.graph_state import moments, promise_kept
from tests.conditions import until
from tests.decode.graph import counted
from tests.frontend.conftest import Graph, in_session
from tests.frontend.sequence.test_moving import post, steps
from tests.frontend.test_generate import complete

CHAT = SloTargets(0.5, 0.06)
EASY = SloTargets(3600.0, 3600.0)
HOPS = [
    Hop("admission", 0.0, 0.1),
    Hop("queue", 0.1, 0.4),
    Hop("prefill", 0.5, 0.1),
    Hop("transfer", 0.6, 0.05),
    Hop("first-step", 0.65, 0.02),
    Hop("decode", 0.6, 2.0),
]


async def _send(_: object) -> None: ...


def receipt(
    promised: SloTargets,
    *,
    ttft: float | None = 0.2,
    gap: tuple[float, float] = (0.01, 0.3),
    status: int = 200,
    hops: list[Hop] = HOPS,
    path: str = "/v1/completions",
    running: bool = False,
) -> Receipt:
    """`gap`: length of the longest gap, and the gap's end after the request's start, in seconds."""
    state = RequestState("id", path, 1600.0, started=1000.0, promised=promised)
    state.first_token = None if ttft is None else state.started + ttft
    state.longest_gap, state.longest_gap_end = gap[0], state.started + gap[1]
    state.hops._past = hops
    response = ResponseWriter(_send, state)
    response.status = status
    return receipt_of(response, "frontend-0", 1003.0, running=running)


@pytest.mark.parametrize(
    ("found", "promise", "broken_by"),
    [
        (receipt(CHAT), "kept", ""),
        (receipt(NO_SLO, ttft=2.0), "", ""),
        (receipt(CHAT, ttft=0.6), "ttft", "queue"),
        (receipt(CHAT, ttft=0.6, gap=(0.07, 0.67)), "ttft", "queue"),
        (receipt(CHAT, ttft=None, running=True, hops=HOPS[:3]), "ttft", "queue"),
        (receipt(CHAT, gap=(0.07, 0.67)), "gap", "transfer"),
        (receipt(CHAT, gap=(0.2, 1.4)), "gap", "decode"),
        (receipt(CHAT, gap=(0.2, 1.4), hops=[*HOPS, Hop("migration", 1.3)]), "gap", "migration"),
        (receipt(SloTargets(ttft=0.5), gap=(0.2, 1.4)), "kept", ""),
        (receipt(SloTargets(gap=0.06), ttft=2.0), "kept", ""),
        (receipt(CHAT, status=429, ttft=None), "failed", ""),
        (receipt(CHAT, status=503), "failed", ""),
        (receipt(CHAT, status=400, ttft=None), "", ""),
        (receipt(CHAT, status=499), "", ""),
        (receipt(CHAT, status=499, ttft=None, hops=HOPS[:3]), "ttft", "queue"),
        (receipt(CHAT, running=True), "", ""),
        (receipt(CHAT, path="/tokenize", ttft=None), "", ""),
    ],
)
def test_a_receipt_says_whether_its_promise_was_kept(found: Receipt, promise: str, broken_by: str) -> None:
    assert (found.promise, found.broken_by) == (promise, broken_by)


def test_the_kept_share_is_of_all_requests_with_a_promise() -> None:
    series = moments([[Tick(requests=5, promised=4, kept=3), Tick(requests=2)], [Tick(promised=4, kept=4)]])
    assert [(moment.promised, moment.kept) for moment in series] == [(2.0, 1.5), (2.0, 2.0)]
    assert promise_kept(series) == "kept by 87.5% of 8 requests in the last 0 minutes"
    assert promise_kept(moments([[Tick(requests=3)]])) == ""


def told(outcome: str) -> float:
    return counted("pdserve_slo_total", outcome=outcome)


@in_session
async def test_promises_are_counted(graph: Graph) -> None:
    before = {outcome: told(outcome) for outcome in ("kept", "ttft", "gap", "failed")}
    for slo, pace in (
        (NO_SLO, 0.0),
        (EASY, 0.0),
        (SloTargets(0.001, 60.0), 0.005),
        (SloTargets(60.0, 0.001), 0.005),
    ):
        async with graph.worker(slo=slo, pace=pace):
            await complete(graph)
    async with graph.worker(slo=EASY, pace=None) as worker:
        request = post(graph)
        await steps(worker, 1)
        await worker.send(Failed(worker.seen[0].request_id, "no more"))
        assert (await request).status_code == 500
    await until(lambda: all(told(outcome) == before[outcome] + 1 for outcome in before))
    failed, gap, ttft, kept, none = graph.plugins.receipts(5)
    assert [each.promise for each in (failed, gap, ttft, kept, none)] == ["failed", "gap", "ttft", "kept", ""]
    assert (gap.broken_by, kept.broken_by) == ("decode", "")
    assert kept.longest_gap > 0
