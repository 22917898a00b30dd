"""The numbers behind `estimate.py`: measured speeds of prefills here and at the prefill workers, and the prompts under
way."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate

import msgspec

from pdserve.decode.estimate import Estimates, SeenLoad, estimate
from pdserve.decode.order import rank
from pdserve.decode.prefill_workers import PrefillWorkers
from pdserve.decode.promises import Stakes
from pdserve.decode.requests import DecodeRequest, DecodeRequests
from pdserve.messages import PrefillDone, PrefillLoad
from pdserve.process.learned import SHORTEST, WEIGHT, LearnedMean, PrefillSpeed, revised
from pdserve.queue.base import PrefillQueue
from pdserve.recent import RecentKeys

FIRST_TOKEN_SECONDS = 1 / 5000
"""seconds for a token of a prompt, until an engine was measured"""
SHORTEST_SPACING = 0.001
"""seconds between two prompts that count"""
FIRST_HANDOVER = 0.02
"""seconds, until a handover was measured"""


def _behind(
    waiting: Iterable[DecodeRequest],
    tokens: Callable[[DecodeRequest], int],
    seconds: float,
    new: float,
    now: float,
) -> list[tuple[DecodeRequest, int]]:
    """Return which of the prompts that wait have their turn after a new one of this rank (`order.py`), as far as they
    are of its client, and their tokens; `seconds`: for a token."""
    ranks = {each: rank(each.due, tokens(each) * seconds, now) for each in waiting}
    behind = sorted((each for each in ranks if ranks[each] > new), key=ranks.__getitem__)
    return [(each, tokens(each)) for each in behind]


def _expected(
    behind: list[tuple[DecodeRequest, int]], wait: float, seconds: float, now: float
) -> list[tuple[float, float]]:
    """Return, for each, when its first token is expected and when it is due, in seconds from now."""
    sums = accumulate(tokens for _, tokens in behind)
    return [(wait + tokens * seconds, each.due - now) for tokens, (each, _) in zip(sums, behind, strict=True)]


@dataclass(eq=False)
class Estimator:
    requests: DecodeRequests
    queue: PrefillQueue
    workers: PrefillWorkers
    clock: Callable[[], float] = time.monotonic
    chunk: int = 0
    """tokens of a prompt in a step; 0: all of it"""
    beside: Callable[[], int] = lambda: 0
    """role `both`: tokens of the prompts from the queue in this engine"""
    _here: PrefillSpeed = field(default_factory=PrefillSpeed)
    _plain: LearnedMean = field(default_factory=LearnedMean)
    """seconds of a step with streams alone"""
    _chunk: LearnedMean = field(default_factory=LearnedMean)
    """seconds that a step is longer with a chunk of a prompt in it"""
    _step: tuple[float, LearnedMean | None] = (0.0, None)
    """when the last step ended, and what the next one measures"""
    _came: float = 0.0
    """when the last prompt with a promise came"""
    _spacing: float = 1.0
    """mean seconds between two of them"""
    _handover: LearnedMean = field(default_factory=lambda: LearnedMean(FIRST_HANDOVER))
    _answered: RecentKeys[tuple[float, float]] = field(default_factory=lambda: RecentKeys(1000))
    """by prefill worker: seconds for a token of the last prompt that it answered, and when; an upper bound, since that
    prompt may have waited for others in the engine"""

    def of(self, compute: int, prompt: int, due: float = math.inf, gap: float = math.inf) -> Estimates | None:
        """Costs of a prompt that comes now, whose first token is promised for `due`, and gaps of `gap` at most; None
        without a prefill worker. To be called once for each prompt: it also measures how often they come."""
        now, workers = self.clock(), [worker.id for worker in self.workers.available()]
        if not workers:
            return None
        requests = self.requests.clients()
        seen = {name: self._seen(name, now) for name in workers}
        held = Counter[str]()
        for request in requests:
            held[request.prefiller] += request.awaits_tokens
        here, there = self._token_seconds(seen, now)
        spread = 1 / sum(1 / seconds for seconds in there)
        behind_here = _behind(
            [each for each in requests if each.computes and not each.since],
            lambda each: each.computes,
            here,
            rank(due, compute * here, now),
            now,
        )
        behind_there = _behind(
            [each for each in requests if each.awaits_tokens and not each.published],
            lambda each: each.awaits_tokens,
            spread,
            rank(due, prompt * spread, now),
            now,
        )
        estimates = estimate(
            compute,
            prompt,
            streams=sum(request.proven for request in requests),
            ahead_here=self.beside()
            + sum(request.computes for request in requests)
            - sum(tokens for _, tokens in behind_here),
            here=here,
            queued=self._queued(requests, prompt) - sum(tokens for _, tokens in behind_there),
            there=[
                seen[name].left(held[name], seconds) for name, seconds in zip(workers, there, strict=True)
            ],
            handover=revised(self._handover.value, now - self._handover.at, FIRST_HANDOVER) or FIRST_HANDOVER,
        )
        if due == gap == math.inf:
            return estimates
        spacing = self._arrived(now)
        plain = self._plain.value or 0.0
        stakes = Stakes(
            due - now,
            gap,
            plain,
            plain + (self._chunk.value or (self.chunk or compute) * here),
            chunks=estimates.wait_here > estimates.wait_there + estimates.compute_there,
            handover=estimates.handover,
            gaps=[each.gap for each in requests if not each.torn and (each.proven or each.computes)],
            coming=[each.gap for each in requests if not (each.torn or each.proven or each.computes)],
            newcomers=max(0.0, estimates.compute_here - estimates.wait_there - estimates.compute_there)
            / spacing,
            here=_expected(behind_here, estimates.wait_here, here, now),
            there=_expected(behind_there, estimates.wait_there, spread, now),
        )
        breaks = (
            stakes.broken_here(estimates.wait_here, estimates.compute_here),
            stakes.broken_there(estimates.wait_there, estimates.compute_there, prompt * spread),
        )
        return replace(estimates, breaks=breaks)

    def _arrived(self, now: float) -> float:
        """A prompt with a promise comes; return the mean time between two."""
        if self._came:
            self._spacing += WEIGHT * (now - self._came - self._spacing)
        self._came = now
        return max(self._spacing, SHORTEST_SPACING)

    def stepped(self, now: float) -> None:
        """The engine ended a step: learn how long streams wait for one, with a chunk of a prompt and without."""
        began, kind = self._step
        if kind is self._plain:
            kind.learn(now - began, now)
        elif kind is not None:
            kind.learn(max(0.0, now - began - (self._plain.value or 0.0)), now)
        streams = computes = False
        for request in self.requests:
            streams |= request.proven
            computes |= request.computes > 0 and request.since > 0
        self._step = now, (self._chunk if computes else self._plain) if streams else None

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
        here = revised(mean.value, now - mean.at, best)
        expected = [
            revised(value, load.age, mean.value) for value, load in zip(there, seen.values(), strict=True)
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
