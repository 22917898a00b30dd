"""A link to a decode worker, from its first message to its last."""

import asyncio

from msgspec.structs import replace

from pdserve.frontend.edge.trace import RequestTrace
from pdserve.frontend.model.generation import Generation
from pdserve.frontend.model.link import Link
from pdserve.frontend.model.vllm_api import EngineCoreRequest
from pdserve.frontend.model.workers import WorkerPool
from pdserve.messages import Cancel, Failed, Load, ToFrontend
from pdserve.observe.metrics import ROUTER_DECISIONS
from pdserve.records import Instance, Role
from pdserve.stream.tcp import TcpStreamClient, TcpStreamServer


def trace() -> RequestTrace:
    return RequestTrace("r", "/v1/completions", 0.0)


def request(prompt: list[int]) -> EngineCoreRequest:
    return EngineCoreRequest("r", prompt, None, None, None, 0.0, None, None, None)


class Listener:
    def __init__(self) -> None:
        self.up, self.lost = asyncio.Event(), asyncio.Event()
        self.messages: list[ToFrontend] = []

    def link_up(self, link: Link) -> None:
        self.up.set()

    def received(self, link: Link, message: ToFrontend) -> None:
        self.messages.append(message)
        link.post(Cancel(["r"]))

    def link_lost(self, link: Link, reason: str) -> None:
        self.lost.set()

    def hand_over(self, link: Link, *, begun: bool) -> None: ...


def decisions() -> list[float]:
    (metric,) = ROUTER_DECISIONS.collect()
    return [
        sample.value
        for sample in metric.samples
        if sample.labels["instance"] == "decode-0" and sample.name.endswith("_total")
    ]


async def test_a_workers_last_messages_are_read_though_nothing_can_be_sent_to_it_any_more() -> None:
    """They say which requests its engine was computing when it died."""
    listener, last_messages = Listener(), [Failed(str(number), "the engine died") for number in range(500)]
    pool = WorkerPool("round-robin", "0", lambda address: TcpStreamClient(address, "frontend-0"), listener)
    async with TcpStreamServer("127.0.0.1") as worker:
        pool.update([Instance("decode-0", Role.DECODE, address=worker.address, vllm_version="0")], 1)
        await listener.up.wait()
        assert pool.pick(Generation(request([1]), trace()), only_others=False) is not None
        for message in last_messages:
            await worker.send("frontend-0", message)
    async with asyncio.timeout(60):
        await listener.lost.wait()
    assert listener.messages == last_messages
    assert decisions() == [1]
    await pool.close()
    assert decisions() == [], "the metrics of a model's workers end with the model"


async def test_a_worker_that_drains_is_not_even_the_last_resort() -> None:
    listener = Listener()
    pool = WorkerPool("round-robin", "0", lambda address: TcpStreamClient(address, "frontend-0"), listener)
    async with TcpStreamServer("127.0.0.1") as server:
        worker = Instance("decode-0", Role.DECODE, address=server.address, vllm_version="0")
        for draining in (False, True, False):
            pool.update([replace(worker, draining=draining)], 1)
            await listener.up.wait()
            chosen = pool.pick(Generation(request([1]), trace()), only_others=False)
            assert (chosen is None) == draining
        await pool.close()


def test_outstanding_tokens_include_what_other_frontends_chose_since_the_report() -> None:
    link = Link("decode-0", lambda _: None)
    asked = request([1] * 50)
    first, second = Generation(asked, trace(), size=60.0), Generation(asked, trace(), size=70.0)
    first.attach(link, "1")
    assert [link.outstanding(frontends) for frontends in (1, 3)] == [60, 3 * 60]
    first.add_tokens([5] * 4)
    link.take_load(Load(tokens=1054))
    assert [link.outstanding(frontends) for frontends in (1, 3)] == [1060, 1060]
    second.attach(link, "2")
    assert [link.outstanding(frontends) for frontends in (1, 3)] == [1130, 1130 + 2 * 70]
    first.detach()
    link.take_load(Load(tokens=20))  # it does not know of the second yet
    assert link.outstanding(3) == 70
    Generation(asked, trace(), size=80.0).attach(link, "3")
    second.detach()
    link.generations["3"].detach()
    assert (link.outstanding(3), link.sent) == (0, 0), "nothing is reported while the load stays the same"
