"""What a decode worker has learned of prefills here and elsewhere, and what it knows to be under way:
the numbers behind `estimate.py`."""

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from pdserve.decode.estimate import Estimates, SeenLoad, estimate
from pdserve.decode.prefill_workers import PrefillWorkers
from pdserve.decode.requests import DecodeRequest, DecodeRequests
from pdserve.messages import PrefillDone, PrefillLoad
from pdserve.process.learned import SHORTEST, LearnedMean, PrefillSpeed, hopeful
from pdserve.queue.base import PrefillQueue
from pdserve.recent import RecentKeys

FIRST_TOKEN_SECONDS = 1 / 5000
"""for each token of a prompt, until any engine was measured"""
FIRST_HANDOVER = 0.02
"""seconds, until a handover was measured"""


@dataclass(eq=False)
class Estimator:
    requests: DecodeRequests
    queue: PrefillQueue
    workers: PrefillWorkers
    clock: Callable[[], float] = time.monotonic
    beside: Callable[[], int] = lambda: 0
    """tokens of the prompts that this engine has from the queue, being of role `both`"""
    _here: PrefillSpeed = field(default_factory=PrefillSpeed)
    _handover: LearnedMean = field(default_factory=lambda: LearnedMean(FIRST_HANDOVER))
    _answered: RecentKeys[tuple[float, float]] = field(default_factory=lambda: RecentKeys(1000))
    """of each prefill worker: seconds for a token of the last prompt that it answered, and when; it may have waited for
    others in the engine, so the worker is at least as fast"""

    def of(self, compute: int, prompt: int) -> Estimates | None:
        """For a prompt that comes now; None without a prefill worker."""
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
            handover=hopeful(self._handover.value, now - self._handover.at, FIRST_HANDOVER) or FIRST_HANDOVER,
        )

    def _seen(self, worker: str, now: float) -> SeenLoad:
        load, at = self.queue.loads.get(worker, (PrefillLoad(), 0.0))
        answered, since = self._answered.get(worker, (0.0, 0.0))
        if since > at and (answered < load.token_seconds or not load.token_seconds):
            load = msgspec.structs.replace(load, token_seconds=answered)
        return SeenLoad(load, now - at)

    def _token_seconds(self, seen: dict[str, SeenLoad], now: float) -> tuple[float, list[float]]:
        """Here, and of each prefill worker. What was not measured lately may be as good as the other."""
        mean = self._here.token_seconds
        there = [load.load.token_seconds or None for load in seen.values()]
        best = min(filter(None, there), default=None)
        here = hopeful(mean.value, now - mean.at, best)
        hoped = [
            hopeful(value, load.age, mean.value) for value, load in zip(there, seen.values(), strict=True)
        ]
        known = best or mean.value or FIRST_TOKEN_SECONDS
        return here or known, [value or known for value in hoped]

    def _queued(self, requests: Collection[DecodeRequest], prompt: int) -> float:
        """Tokens of this worker's own requests that no prefill worker has pulled, with those that are being published;
        of other decode workers' only the number is known."""
        own = [
            request.awaits_tokens for request in requests if request.awaits_tokens and not request.prefiller
        ]
        others = max(0, self.queue.depth - len(own))
        return sum(own) + others * (sum(own) / len(own) if own else prompt)

    def first_token(self, request: DecodeRequest, now: float) -> None:
        """This engine's first came `now`: learn of the way that its prompt went."""
        if request.computes:
            self._here.done(request.computes, request.since, now)
        if request.decision is None or request.decision.mode == "local" or request.answer is None:
            return
        tokens, done = len(request.submit.prompt), request.answer.result()
        if isinstance(done, PrefillDone) and tokens >= SHORTEST:
            self._answered[request.prefiller] = done.compute_seconds / tokens, now
        if not any(other.computes for other in self.requests):  # else it waited for those
            self._handover.learn(now - request.since, now)
