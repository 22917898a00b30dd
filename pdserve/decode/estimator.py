"""The numbers behind `estimate.py`: measured speeds of prefills here and at the prefill workers, and the prompts under
way."""

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from pdserve.decode.estimate import Estimates, SeenLoad, estimate
from pdserve.decode.prefill_workers import PrefillWorkers
from pdserve.decode.requests import DecodeRequest, DecodeRequests
from pdserve.messages import PrefillDone, PrefillLoad
from pdserve.process.learned import SHORTEST, LearnedMean, PrefillSpeed, revised
from pdserve.queue.base import PrefillQueue
from pdserve.recent import RecentKeys

FIRST_TOKEN_SECONDS = 1 / 5000
"""seconds for a token of a prompt, until an engine was measured"""
FIRST_HANDOVER = 0.02
"""seconds, until a handover was measured"""


@dataclass(eq=False)
class Estimator:
    requests: DecodeRequests
    queue: PrefillQueue
    workers: PrefillWorkers
    clock: Callable[[], float] = time.monotonic
    beside: Callable[[], int] = lambda: 0
    """role `both`: tokens of the prompts from the queue in this engine"""
    _here: PrefillSpeed = field(default_factory=PrefillSpeed)
    _handover: LearnedMean = field(default_factory=lambda: LearnedMean(FIRST_HANDOVER))
    _answered: RecentKeys[tuple[float, float]] = field(default_factory=lambda: RecentKeys(1000))
    """by prefill worker: seconds for a token of the last prompt that it answered, and when; an upper bound, since that
    prompt may have waited for others in the engine"""

    def of(self, compute: int, prompt: int) -> Estimates | None:
        """Costs of a prompt that comes now; None without a prefill worker."""
        now, workers = self.clock(), [worker.id for worker in self.workers.available()]
        if not workers:
            return None
        requests = self.requests.clients()
        seen = {name: self._seen(name, now) for name in workers}
        held = Counter[str]()
        for request in requests:
            held[request.prefiller] += request.awaits_tokens
        here, there = self._token_seconds(seen, now)
        return estimate(
            compute,
            prompt,
            streams=sum(request.proven for request in requests),
            ahead_here=self.beside() + sum(request.computes for request in requests),
            here=here,
            queued=self._queued(requests, prompt),
            there=[
                seen[name].left(held[name], seconds) for name, seconds in zip(workers, there, strict=True)
            ],
            handover=revised(self._handover.value, now - self._handover.at, FIRST_HANDOVER) or FIRST_HANDOVER,
        )

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
