"""What a decode worker reports of its prompts in seconds, and the routing by it, in virtual time."""

import itertools
from types import SimpleNamespace

import pytest

from pdserve.frontend.model.candidates import Prospect, keeping
from pdserve.frontend.model.router import choose
from pdserve.messages import Load, Promise
from pdserve.records import Instance, Role
from pdserve.slo import is_spare
from tests.decode.virtual import ADAPTIVE, Promised, VirtualGraph, VirtualRequest

REPORT = 0.5


class RoutedGraph(VirtualGraph):
    """One frontend, which follows the load of two decode workers, of which the second is slow."""

    def __init__(self, promised: Promised, slower: float, *, routed: bool) -> None:
        super().__init__(ADAPTIVE, decode=2, promised=promised)
        self.decode[1].slow = slower
        self._routed, self._turn = routed, itertools.count()
        self._instances = [Instance(str(number), Role.DECODE) for number in range(2)]
        self._links = [SimpleNamespace(load=Load(), sent=0) for _ in self.decode]
        self._report()

    def _report(self) -> None:
        for link, worker in zip(self._links, self.decode, strict=True):
            found = worker.estimator.outlook()
            load = Load(
                prompt_wait=found.wait,
                token_seconds=found.token,
                gap_seconds=found.gap,
                tokens=len(worker.live),
            )
            link.load, link.sent = load, 0
        self.after(REPORT, self._report)

    def ask(self, prompt: int = 1300, tokens: int = 64, client: str = "") -> None:
        first = next(self._turn) % 2
        candidates = [self._instances[first], self._instances[1 - first]]
        if self._routed:
            prospects = {
                str(number): Prospect.of(link.load, link.sent, prompt)
                for number, link in enumerate(self._links)
            }
            promise = Promise(self.promised.ttft, self.promised.gap)
            candidates = keeping(promise, candidates, prospects)
        number = int(choose("round-robin", candidates, {}, {}).id)
        self._links[number].sent += prompt
        worker = self.decode[number]
        worker.submit(VirtualRequest(prompt, tokens, self.now, worker, client))


def kept(slower: float, rate: float, promised: Promised, *, routed: bool) -> float:
    graph = RoutedGraph(promised, slower, routed=routed)
    done = graph.poisson(rate, 60)
    return sum(each.keeps(promised) for each in done) / (
        len(done) + sum(len(worker.live) for worker in graph.decode)
    )


@pytest.mark.parametrize("rate", [2.0, 10.0])
@pytest.mark.parametrize(
    ("promised", "slower"),
    [
        (Promised(0.5, 0.06), 10.0),
        (Promised(0.5, 0.06), 30.0),
        (Promised(0.2, 0.1), 30.0),
        (Promised(2.0, 0.04), 10.0),
        (Promised(2.0, 0.04), 30.0),
    ],
)
def test_with_a_slow_worker_beside_a_fast_one_more_promises_are_kept(
    promised: Promised, slower: float, rate: float
) -> None:
    without, with_it = (kept(slower, rate, promised, routed=routed) for routed in (False, True))
    assert with_it > min(without + 0.09, 0.95)


@pytest.mark.parametrize("rate", [2.0, 14.0])
def test_workers_that_are_equally_fast_share_the_requests_as_without_a_promise(rate: float) -> None:
    promised = Promised(0.5, 0.06)
    without, with_it = (kept(1.0, rate, promised, routed=routed) for routed in (False, True))
    assert with_it > without - 0.03


def test_a_worker_that_became_fast_gets_requests_again() -> None:
    graph = RoutedGraph(Promised(0.5, 0.06), 30.0, routed=True)

    def recover() -> None:
        graph.decode[1].slow = 1.0

    graph.after(30.0, recover)
    done = graph.poisson(4, 120)
    late = [each for each in done if each.begun > 90]
    there = sum(each.decode is graph.decode[1] for each in late) / len(late)
    assert 0.3 < there < 0.7


def test_prompts_that_wait_are_a_backlog_which_ends_with_them() -> None:
    graph = VirtualGraph(ADAPTIVE, decode=2)
    assert [each.estimator.outlook().backlog for each in graph.decode] == [0.0, 0.0]
    for client in ["", "~spare"] * 20:
        for worker in graph.decode:
            worker.submit(VirtualRequest(1300, 64, 0.0, worker, client))
    backlogs = [each.estimator.outlook().backlog for each in graph.decode]
    tokens = sum(
        each.prompt
        for worker in graph.decode
        for each in worker.live
        if not (each.prefiller or each.since or is_spare(each.client))
    )
    assert sum(backlogs) == pytest.approx(tokens / 5000), "each prompt counts once, at its own worker"
    graph.run(60.0)
    assert len(graph.done) == 80
    assert [each.estimator.outlook().backlog for each in graph.decode] == [0.0, 0.0]
