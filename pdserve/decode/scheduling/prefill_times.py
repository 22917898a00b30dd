"""The numbers behind `policy/cost.py`: measured speeds of prefills here and at the prefill workers, and the prompts
under way."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

import msgspec

from pdserve.contract.messages import PrefillDone, PrefillLoad
from pdserve.contract.slo import is_flex
from pdserve.decode.peers.prefill_workers import PrefillWorkers
from pdserve.decode.policy.cost import Estimates, SeenLoad, estimate
from pdserve.decode.policy.slo_risk import Stakes, chunk_of, chunk_without_promise, longest_step
from pdserve.decode.requests import DecodeRequest, DecodeRequests
from pdserve.decode.scheduling.prompt_queue import is_late
from pdserve.process.learned import SHORTEST, WEIGHT, LearnedMean, PrefillSpeed, decayed
from pdserve.queue.base import PrefillQueue
from pdserve.util.lru import LruDict

FIRST_TOKEN_SECONDS = 1 / 5000
"""seconds for a token of a prompt, until an engine was measured"""
SHORTEST_TOKEN = 1e-6
"""seconds for a token of a prompt beside streams that are believed"""
SHORTEST_SPACING = 0.001
"""seconds between two prompts that count"""
FIRST_HANDOVER = 0.02
"""seconds, until a handover was measured"""
DISTURBED = 1.5
"""factor between steps beside a prefill elsewhere and without: less is what noise and a few streams more make of it"""


def _passed(
    waiting: Iterable[tuple[float, int]], due: float, tokens: int, token_seconds: float, now: float
) -> int:
    """Tokens of the waiting prompts (TTFT deadline, tokens) that let a new prompt pass (`prompt_queue.py`)."""
    if is_late(due, tokens * token_seconds, now):
        return 0
    return sum(each for when, each in waiting if is_late(when, each * token_seconds, now))


@dataclass(frozen=True)
class Outlook:
    """In seconds."""

    backlog: float
    """of one worker, to compute the prompts of the requests here that no engine has yet"""
    wait: float
    """until a prompt that comes now is begun, on the way where that is sooner"""
    token: float
    """for each of its tokens, there"""
    gap: float
    """from one token of a stream to the next without prompts, or from its KV to the next one, whichever is longer. It
    fades while none is measured: the worker may be faster by now, which only requests show"""


@dataclass(eq=False)
class Estimator:
    requests: DecodeRequests
    queue: PrefillQueue
    workers: PrefillWorkers
    clock: Callable[[], float] = time.monotonic
    usual: int = 0
    """tokens of prompts in a step without streams, and at most beside streams without a promise; 0: all of them"""
    block: Callable[[], int] = lambda: 1
    """tokens in a KV block"""
    beside: Callable[[], int] = lambda: 0
    """role `both`: tokens of the prompts from the queue in this engine"""
    _here: PrefillSpeed = field(default_factory=PrefillSpeed)
    _plain: LearnedMean = field(default_factory=LearnedMean)
    """seconds of a step with streams alone"""
    _undisturbed: LearnedMean = field(default_factory=LearnedMean)
    """of those, while no prefill worker computes for them"""
    _disturbed: LearnedMean = field(default_factory=LearnedMean)
    """and while one does"""
    _elsewhere: bool = False
    """one did when the last step ended"""
    _token: LearnedMean = field(default_factory=LearnedMean)
    """seconds that a step is longer for each token of a prompt in it"""
    _chunks: tuple[int, float] = (0, 0.0)
    """tokens of prompts, and how much longer the steps with them were, since `_token` was learned last"""
    _ended: float = 0.0
    """when the last step ended; 0: no stream waits for the next one"""
    _came: float = 0.0
    """when the last prompt came"""
    _spacing: float = 1.0
    """mean seconds between two of them"""
    _handover: LearnedMean = field(default_factory=lambda: LearnedMean(FIRST_HANDOVER))
    _answered: LruDict[tuple[float, float]] = field(default_factory=lambda: LruDict(1000))
    """by prefill worker: seconds for a token of the last prompt that it answered, and when; an upper bound, since that
    prompt may have waited for others in the engine"""

    def of(self, asked: DecodeRequest, compute: int, prompt: int) -> Estimates | None:
        """Costs of the prompt of a request that comes now, and is among those that are here already; None without a
        prefill worker. To be called once for each prompt: it also measures how often they come."""
        due, gap = asked.due, asked.gap
        now, workers = self.clock(), [worker.id for worker in self.workers.available()]
        if not workers:
            return None
        requests = [each for each in self._before(is_flex(asked.submit.client)) if each is not asked]
        spacing = self._arrived(now)
        seen = {name: self._seen(name, now) for name in workers}
        held = Counter[str]()
        for request in requests:
            held[request.prefiller] += request.awaits_tokens
        here, there = self._token_seconds(seen, now)
        computed = ((each.due, each.computes) for each in requests if each.computes and not each.since)
        passed_here = _passed(computed, due, compute, here, now)
        held_back = ((each.due, each.awaits_tokens) for each in requests if not each.published)
        spread = 1 / sum(1 / seconds for seconds in there)
        passed_there = _passed(held_back, due, prompt, spread, now)
        estimates = estimate(
            compute,
            prompt,
            streams=sum(request.proven for request in requests),
            ahead_here=self.beside() + sum(request.computes for request in requests) - passed_here,
            here=here,
            queued=self._queued(requests, prompt) - passed_there,
            there=[
                seen[name].left(held[name], seconds) for name, seconds in zip(workers, there, strict=True)
            ],
            handover=decayed(self._handover.value, now - self._handover.at, FIRST_HANDOVER) or FIRST_HANDOVER,
            beside=self._token.value,
            rate=1 / spacing,
            lost=self._lost(now),
        )
        if due == gap == math.inf:
            return estimates
        plain, token = self._plain.value or 0.0, self._token.value or here
        stakes = Stakes(
            left=due - now,
            gap=gap,
            plain=plain,
            step=plain + min(self._chunk(requests) or compute, compute) * token,
            gaps=[
                each.gap
                for each in requests
                if not each.broken and (each.proven or (now < each.due and each.computes))
            ],
        )
        breaks = (
            stakes.broken_here(estimates.wait_here, estimates.compute_here),
            stakes.broken_there(estimates.wait_there + estimates.compute_there),
        )
        return replace(estimates, breaks=breaks)

    def _arrived(self, now: float) -> float:
        """A prompt comes; return the mean time between two."""
        if self._came:
            self._spacing += WEIGHT * (now - self._came - self._spacing)
        self._came = now
        return max(self._spacing, SHORTEST_SPACING)

    @property
    def chunk(self) -> int:
        """Tokens of prompts in a step, for what is here now."""
        return self._chunk(self.requests.clients())

    def _chunk(self, requests: Iterable[DecodeRequest]) -> int:
        plain, token, usual, block = (
            self._plain.value or 0.0,
            self._token.value or 0.0,
            self.usual,
            self.block(),
        )
        streams = [each for each in requests if each.proven]
        if streams and all(each.gap == math.inf for each in streams):
            return chunk_without_promise(plain, token, usual, block)
        steps = (longest_step(each.gap, plain) for each in streams if not each.broken)
        return chunk_of(min(steps, default=math.inf), plain, token, usual, block)

    def stepped(self, ended: float, prompt_tokens: int) -> None:
        """A step of the engine ended, whose outputs are noted: learn how long streams wait for one, without prompts
        and for each token of a prompt."""
        elsewhere = any(each.awaits_tokens and each.prefiller for each in self.requests)
        if self._ended and not prompt_tokens:
            self._plain.learn(ended - self._ended, ended)
            disturbed = self._elsewhere or elsewhere
            (self._disturbed if disturbed else self._undisturbed).learn(ended - self._ended, ended)
        elif self._ended and self._plain.value and prompt_tokens >= self.block():
            tokens, seconds = self._chunks
            self._chunks = tokens + prompt_tokens, seconds + ended - self._ended - self._plain.value
            if self._chunks[0] >= SHORTEST:
                self._token.learn(max(SHORTEST_TOKEN, self._chunks[1] / self._chunks[0]), ended)
                self._chunks = 0, 0.0
        self._elsewhere = elsewhere
        self._ended = ended if any(request.proven for request in self.requests) else 0.0

    def _lost(self, now: float) -> float:
        """Part of its time that a stream loses while a prefill worker computes: those that share a core with it do."""
        alone = self._undisturbed.value
        beside = decayed(self._disturbed.value, now - self._disturbed.at, alone)
        return 1 - alone / beside if alone and beside and beside > DISTURBED * alone else 0.0

    def _seen(self, worker: str, now: float) -> SeenLoad:
        load, at = self.queue.loads.get(worker, (PrefillLoad(), 0.0))
        answered, since = self._answered.get(worker, (0.0, 0.0))
        if since > at and (answered < load.token_seconds or not load.token_seconds):
            load = msgspec.structs.replace(load, token_seconds=answered)
        return SeenLoad(load, now - at)

    def _token_seconds(self, seen: dict[str, SeenLoad], now: float) -> tuple[float, list[float]]:
        """Seconds for a token here, and at each prefill worker. A speed that was not measured lately may have become as
        good as the other side's."""
        mean = self._here.token_seconds
        there = [load.load.token_seconds or None for load in seen.values()]
        best = min(filter(None, there), default=None)
        here = decayed(mean.value, now - mean.at, best)
        expected = [
            decayed(value, load.age, mean.value) for value, load in zip(there, seen.values(), strict=True)
        ]
        known = best or mean.value or FIRST_TOKEN_SECONDS
        return here or known, [value or known for value in expected]

    def _queued(self, requests: Collection[DecodeRequest], prompt: int) -> float:
        """Tokens that no prefill worker has pulled. Of other decode workers' requests only the number is known: they
        count as long as this worker's."""
        own = [
            request.awaits_tokens for request in requests if request.awaits_tokens and not request.prefiller
        ]
        others = max(0, self.queue.depth - len(own))
        return sum(own) + others * (sum(own) / len(own) if own else prompt)

    def _before(self, spare: bool) -> list[DecodeRequest]:
        """What a request waits for that comes now: one that is not spare, for no spare ones that wait."""
        requests = self.requests.clients()
        return [
            each
            for each in requests
            if spare or each.since or each.prefiller or not is_flex(each.submit.client)
        ]

    def outlook(self) -> Outlook:
        """What a prompt that comes now would find, and what waits."""
        now, workers = self.clock(), [worker.id for worker in self.workers.available()]
        requests, seen = self._before(False), {name: self._seen(name, now) for name in workers}
        here, there = self._token_seconds(seen, now)
        held = Counter[str]()
        for request in requests:
            held[request.prefiller] += request.awaits_tokens
        left = [seen[name].left(held[name], seconds) for name, seconds in zip(workers, there, strict=True)]
        ahead_here = self.beside() + sum(request.computes for request in requests)
        ahead_there = self._queued(requests, SHORTEST) + sum(tokens for tokens, _ in left)
        spread = 1 / sum(1 / seconds for _, seconds in left) if left else math.inf
        ways = [(ahead_here * here, here)]
        if left:
            ways.append((ahead_there * spread, spread * len(left)))
        waits_here = sum(request.computes for request in requests if not request.since)
        gap = max(decayed(mean.value, now - mean.at, 0.0) or 0.0 for mean in (self._plain, self._handover))
        return Outlook(waits_here * here + held[""] * ways[-1][1], *min(ways), gap)

    @property
    def token_seconds_here(self) -> float:
        return self._here.token_seconds.value or FIRST_TOKEN_SECONDS

    def first_token(self, request: DecodeRequest, now: float) -> None:
        """Learn from a request whose first token of this engine came `now`."""
        if request.computes:
            self._here.done(request.computes, request.since, now)
        if request.decision is None or request.decision.mode == "local":
            return
        tokens, done = len(request.submit.prompt), request.outcome
        if isinstance(done, PrefillDone) and tokens >= SHORTEST:
            self._answered[request.prefiller] = done.compute_seconds / tokens, now
        if not any(other.computes for other in self.requests):  # else the request waited for those
            self._handover.learn(now - request.since, now)
