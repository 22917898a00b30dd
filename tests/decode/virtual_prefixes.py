"""A graph in virtual time whose prefill workers have prefix caches, for traces with shared prefixes.

`python -m tests.decode.virtual_prefixes TRACE SPEED REQUESTS BLOCKS` compares two ways: prompts go to
any worker, or to the worker that has their prefix."""

import json
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from pdserve.contract.messages import PrefillDone
from pdserve.decode.policy.decision import PREFIX, decide
from pdserve.decode.remote.client import BEGIN_GRACE
from tests.decode.virtual import (
    ADAPTIVE,
    HANDLE,
    PUBLISH,
    Figures,
    VirtualDecode,
    VirtualGraph,
    VirtualPrefill,
    VirtualRequest,
)


@dataclass(eq=False)
class PrefixRequest(VirtualRequest):
    blocks: Sequence[int] = ()
    """Each id stands for `block` tokens and all tokens before them."""
    block: int = 512
    hit: int = 0


class Cache:
    """An LRU cache of blocks."""

    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self._blocks = OrderedDict[int, None]()

    def hit(self, request: PrefixRequest) -> int:
        found = sum(1 for _ in takewhile(self._blocks.__contains__, request.blocks))
        return min(found * request.block, request.prompt - 2)

    def add(self, request: PrefixRequest) -> None:
        for block in reversed(request.blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.size:
            self._blocks.popitem(last=False)


class PrefixPrefill(VirtualPrefill):
    def __init__(self, graph: "PrefixGraph", number: int, blocks: int) -> None:
        super().__init__(graph, number)
        self.cache = Cache(blocks)
        self.addressed: list[tuple[PrefixRequest, float]] = []
        """Prompts sent to this worker past the queue, each with the latest time at which it may begin."""
        self._begun_addressed = False

    @property
    def _tokens(self) -> int:
        left = sum(each.prompt - each.hit for each in self._prefixed())
        return left + sum(each.prompt for each, _ in self.addressed)

    def _prefixed(self) -> Iterator[PrefixRequest]:
        return (each for each in self.requests if isinstance(each, PrefixRequest))

    def receive(self, request: PrefixRequest, within: float) -> None:
        self.addressed.append((request, self.graph.now + within))
        self.pull()

    def pull(self) -> None:
        while sum(each.prompt - each.hit for each in self._prefixed()) < self._below:
            self.addressed = [each for each in self.addressed if each[1] > self.graph.now]
            if self.addressed and not (self._begun_addressed and self.graph.queue):
                self._begun_addressed = True
                self._take(self.addressed.pop(0)[0])
            elif self.graph.queue:
                self._begun_addressed = False
                self._take(self.graph.queue.pop(0))
            else:
                return

    def _take(self, request: VirtualRequest) -> None:
        assert isinstance(request, PrefixRequest)
        request.hit = request.computed = self.cache.hit(request)
        self.cache.add(request)
        super()._take(request)

    def token(self, request: VirtualRequest) -> None:
        assert isinstance(request, PrefixRequest)
        self.requests.remove(request)
        self._speed.done(request.prompt - request.hit, request.pulled, self.graph.now)
        request.outcome = PrefillDone("", HANDLE, self.graph.now - request.pulled)
        request.computed = request.prompt - 1
        request.decode.answered(request)
        self.pull()


class PrefixDecode(VirtualDecode):
    def submit(self, request: VirtualRequest) -> None:
        graph = self.graph
        assert isinstance(graph, PrefixGraph)
        assert isinstance(request, PrefixRequest)
        self.live.append(request)
        cached = {each.id: hit for each in graph.workers if (hit := each.cache.hit(request))}
        known = cached if graph.by_prefix else {}
        estimates = self.estimator.of(request, request.prompt, request.prompt, self.workers, known)  # type: ignore[arg-type]
        args = request.prompt, 0, self.queue.depth, len(graph.prefill), True, graph.settings
        request.decision = decide(*args, estimates=estimates)
        request.asked = graph.now
        if request.decision.mode == "local":
            request.local_tokens = request.prompt
            needs = request.prompt * self.estimator.local_token_seconds
            self.waiting.add(request.client, request, request.due, needs)
            self._start()
            return
        request.remote_tokens = request.prompt
        if request.decision.reason == PREFIX and estimates and (choice := estimates.prefix):
            request.preferred = choice.worker
            request.remote_tokens -= choice.cached
            worker = next(each for each in graph.workers if each.id == choice.worker)
            graph.after(PUBLISH, partial(worker.receive, request, choice.begin_within))
            graph.after(choice.begin_within + BEGIN_GRACE, partial(self._missed, request))
        else:
            self.turns.add(request)  # type: ignore[arg-type]

    def _missed(self, request: PrefixRequest) -> None:
        if not request.prefiller:
            self.graph.missed += 1  # type: ignore[attr-defined]
            request.preferred, request.remote_tokens = "", request.prompt
            self.turns.add(request)  # type: ignore[arg-type]


class PrefixGraph(VirtualGraph):
    def __init__(self, *, by_prefix: bool, blocks: int, prefill: int = 4, decode: int = 2) -> None:
        """`blocks`: size of each prefill worker's cache."""
        super().__init__(ADAPTIVE, prefill=prefill, decode=decode)
        self.by_prefix, self.missed = by_prefix, 0
        self.workers = [PrefixPrefill(self, number, blocks) for number in range(prefill)]
        self.prefill = list(self.workers)
        self.decode = [PrefixDecode(self, worker.usual) for worker in self.decode]
        self.ways: list[PrefixRequest] = []

    def replay(self, trace: Sequence[tuple[float, int, int, Sequence[int]]]) -> list[VirtualRequest]:
        """`trace`: time, prompt tokens, output tokens and blocks of each request."""
        for number, (at, prompt, tokens, blocks) in enumerate(trace):
            worker = self.decode[number % len(self.decode)]
            request = PrefixRequest(prompt, tokens, at, worker, blocks=blocks)
            self.ways.append(request)
            self.after(at, partial(worker.submit, request))
        self.run(trace[-1][0] + 600)
        return self.done

    @property
    def hits(self) -> float:
        """Share of the tokens of remote prompts that a prefill worker had cached."""
        remote = [each for each in self.ways if each.prefiller]
        return sum(each.hit for each in remote) / sum(each.prompt for each in remote)


def read(file: Path, speed: float, count: int) -> list[tuple[float, int, int, Sequence[int]]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()[:count]]
    return [
        (
            line["timestamp"] / 1000 / speed,
            line["input_length"],
            max(2, line["output_length"] // 16),
            line["hash_ids"],
        )
        for line in lines
    ]


def one_cache(trace: Sequence[tuple[float, int, int, Sequence[int]]], blocks: int) -> float:
    """Share of the prompt tokens that one LRU cache finds."""
    worker, cache, found = PrefixGraph(by_prefix=False, blocks=blocks).decode[0], Cache(blocks), 0
    for at, prompt, tokens, ids in trace:
        request = PrefixRequest(prompt, tokens, at, worker, blocks=ids)
        found += cache.hit(request)
        cache.add(request)
    return found / sum(prompt for _, prompt, _, _ in trace)


if __name__ == "__main__":
    trace = read(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
    blocks = int(sys.argv[4])
    print(f"one cache of their total size finds {one_cache(trace, 4 * blocks):.3f}")
    for by_prefix in (False, True):
        graph = PrefixGraph(by_prefix=by_prefix, blocks=blocks)
        done = graph.replay(trace)
        reasons = Counter(each.decision.reason for each in graph.ways)
        print(
            f"{by_prefix=}: {graph.hits:.3f} hits; {Figures.of(done)}; {dict(reasons)}, missed {graph.missed}"
        )
