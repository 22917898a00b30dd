"""Measures speeds of local and remote prefills, and counts prompts under way: the numbers behind `policy/cost.py`."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from pdserve.contract.messages import PrefillDone, PrefillLoad
from pdserve.contract.slo import is_flex
from pdserve.decode.peers.prefill_workers import PrefillWorkers
from pdserve.decode.policy.cost import Estimates, RemoteWorker, SeenLoad, estimate
from pdserve.decode.policy.slo_risk import SloRisk, chunk_of, chunk_without_slo, longest_step
from pdserve.decode.requests import DecodeRequest, DecodeRequests
from pdserve.kv.handles import prefix_hit
from pdserve.process.learned import MIN_MEASURED_TOKENS, WEIGHT, LearnedMean, PrefillSpeed, decayed
from pdserve.queue.base import PrefillQueue
from pdserve.queue.prompt_queue import is_late
from pdserve.util.lru import LruDict

FIRST_TOKEN_SECONDS = 1 / 5000
"""Seconds per prompt token to assume before an engine is measured."""
MIN_CHUNK_TOKEN = 1e-6
"""Lower bound of the seconds that a prompt token adds to a step that also decodes."""
MIN_SPACING = 0.001
"""Lower bound of the mean seconds between two prompts."""
FIRST_HANDOVER = 0.02
"""Seconds of a handover to assume before one is measured."""
MIN_SLOWDOWN = 1.5
"""Steps during remote prefills count as slowed down if they take more than this many times as long as other steps."""


def _passed(
    waiting: Iterable[tuple[float, int]], due: float, tokens: int, token_seconds: float, now: float
) -> int:
    """Tokens of the late prompts that a new prompt passes; 0 if it is late itself (`prompt_queue.py`). `waiting`: TTFT
    deadline and tokens of each prompt."""
    if is_late(due, tokens * token_seconds, now):
        return 0
    return sum(each for when, each in waiting if is_late(when, each * token_seconds, now))


@dataclass(frozen=True)
class Outlook:
    """In seconds."""

    backlog: float
    """Time that one worker needs for this worker's prompts that no engine has yet."""
    wait: float
    """Time until a prompt that arrives now starts on the sooner way, local or remote."""
    token: float
    """Time for each prompt token on the sooner way."""
    gap: float
    """Time of a step without prompts, or of a handover if that is longer. Both decay while they are not measured."""


@dataclass(eq=False)
class Estimator:
    requests: DecodeRequests
    queue: PrefillQueue
    workers: PrefillWorkers
    clock: Callable[[], float] = time.monotonic
    usual: int = 0
    """Prompt tokens of a step that decodes nothing; 0: prompts are not cut into chunks."""
    block: Callable[[], int] = lambda: 1
    """Tokens of a KV block."""
    prefill_tokens: Callable[[], int] = lambda: 0
    """Role `both`: tokens of the queue's prompts that this engine has."""
    _local: PrefillSpeed = field(default_factory=PrefillSpeed)
    _plain: LearnedMean = field(default_factory=LearnedMean)
    """Seconds of a step that only decodes."""
    _undisturbed: LearnedMean = field(default_factory=LearnedMean)
    """`_plain` while no prefill worker computes a prompt for this worker."""
    _disturbed: LearnedMean = field(default_factory=LearnedMean)
    """`_plain` while a prefill worker computes a prompt for this worker."""
    _was_disturbed: bool = False
    """Whether a prefill worker was computing a prompt for this worker when the last step ended."""
    _chunk_token: LearnedMean = field(default_factory=LearnedMean)
    """Seconds that each prompt token adds to a step."""
    _chunks: tuple[int, float] = (0, 0.0)
    """Prompt tokens, and the seconds that they added to steps, since `_chunk_token` was learned last."""
    _ended: float = 0.0
    """When the last step ended; 0: no sequence is decoded."""
    _last_arrival: float = 0.0
    _spacing: float = 1.0
    """Mean seconds between two prompts."""
    _handover: LearnedMean = field(default_factory=lambda: LearnedMean(FIRST_HANDOVER))
    _answered: LruDict[tuple[float, float]] = field(default_factory=lambda: LruDict(1000))
    """By prefill worker: seconds per token of its last long prompt, and when that prompt had its first step here. The
    seconds are an upper bound, because the prompt may have waited for others in the prefill engine."""

    def of(
        self,
        asked: DecodeRequest,
        compute: int,
        prompt: int,
        workers: Sequence[str],
        cached: Mapping[str, int] = {},
    ) -> Estimates | None:
        """Return the costs of a new request's prefill; None without a prefill worker. `compute`: prompt tokens that are
        not cached here; `cached`: by prefill worker, prompt tokens that are cached there. Also counts the arrival: call
        it once per prompt."""
        if not workers:
            return None
        now = self.clock()
        requests = [each for each in self.requests_ahead(is_flex(asked.submit.client)) if each is not asked]
        local_token, remote = self._speeds(requests, workers, now, cached)
        remote_token = 1 / sum(1 / each.token_seconds for each in remote)
        waiting = ((each.due, each.local_tokens) for each in requests if not each.since)
        held = ((each.due, each.remote_tokens) for each in requests if not each.published)
        local_tokens = self.prefill_tokens() + sum(request.local_tokens for request in requests)
        estimates = estimate(
            compute,
            prompt,
            streams=sum(request.has_first_step for request in requests),
            local_ahead=local_tokens - _passed(waiting, asked.due, compute, local_token, now),
            local_token=local_token,
            queued=self._queued(requests, prompt) - _passed(held, asked.due, prompt, remote_token, now),
            remote=remote,
            handover=decayed(self._handover.value, now - self._handover.at, FIRST_HANDOVER) or FIRST_HANDOVER,
            step_token=self._chunk_token.value,
            rate=1 / self._arrived(now),
            slowdown=self._slowdown(now),
        )
        if asked.due == asked.gap == math.inf:
            return estimates
        plain, token = self._plain.value or 0.0, self._chunk_token.value or local_token
        risk = SloRisk(
            left=asked.due - now,
            gap=asked.gap,
            plain=plain,
            step=plain + min(self._chunk(requests) or compute, compute) * token,
            gaps=[
                each.gap
                for each in requests
                if not each.missed_slo and (each.has_first_step or (now < each.due and each.local_tokens))
            ],
        )
        misses = (
            risk.local_misses(estimates.local_wait, estimates.local_compute),
            risk.remote_misses(estimates.remote_wait + estimates.remote_compute),
        )
        return replace(estimates, slo_misses=misses)

    def _arrived(self, now: float) -> float:
        """Record the arrival of a prompt; return the mean seconds between two."""
        if self._last_arrival:
            self._spacing += WEIGHT * (now - self._last_arrival - self._spacing)
        self._last_arrival = now
        return max(self._spacing, MIN_SPACING)

    @property
    def chunk(self) -> int:
        """Prompt tokens of a step, given the sequences that are decoded now."""
        return self._chunk(self.requests.clients())

    def _chunk(self, requests: Iterable[DecodeRequest]) -> int:
        plain, token = self._plain.value or 0.0, self._chunk_token.value or 0.0
        decoding = [each for each in requests if each.has_first_step]
        if decoding and all(each.gap == math.inf for each in decoding):
            return chunk_without_slo(plain, token, self.usual, self.block())
        steps = (longest_step(each.gap, plain) for each in decoding if not each.missed_slo)
        return chunk_of(min(steps, default=math.inf), plain, token, self.usual, self.block())

    def stepped(self, ended: float, prompt_tokens: int) -> None:
        """Learn how long an engine step takes without prompts, and how many seconds each prompt token adds. Call it
        after the step's outputs are recorded."""
        is_disturbed = any(each.remote_tokens and each.prefiller for each in self.requests)
        if self._ended and not prompt_tokens:
            self._plain.learn(ended - self._ended, ended)
            disturbed = self._was_disturbed or is_disturbed
            (self._disturbed if disturbed else self._undisturbed).learn(ended - self._ended, ended)
        elif self._ended and self._plain.value and prompt_tokens >= self.block():
            tokens, seconds = self._chunks
            tokens += prompt_tokens
            seconds += ended - self._ended - self._plain.value
            self._chunks = tokens, seconds
            if tokens >= MIN_MEASURED_TOKENS:
                self._chunk_token.learn(max(MIN_CHUNK_TOKEN, seconds / tokens), ended)
                self._chunks = 0, 0.0
        self._was_disturbed = is_disturbed
        self._ended = ended if any(request.has_first_step for request in self.requests) else 0.0

    def _slowdown(self, now: float) -> float:
        """Share of its time that a decoding sequence loses during remote prefills; 0 if that is noise."""
        normal = self._undisturbed.value
        slow = decayed(self._disturbed.value, now - self._disturbed.at, normal)
        return 1 - normal / slow if normal and slow and slow > MIN_SLOWDOWN * normal else 0.0

    def _seen(self, worker: str, now: float) -> SeenLoad:
        load, at = self.queue.loads.get(worker, (PrefillLoad(), 0.0))
        answered, since = self._answered.get(worker, (0.0, 0.0))
        if since > at and (answered < load.token_seconds or not load.token_seconds):
            load = msgspec.structs.replace(load, token_seconds=answered)
        return SeenLoad(load, now - at)

    def _speeds(
        self,
        requests: Iterable[DecodeRequest],
        workers: Sequence[str],
        now: float,
        cached: Mapping[str, int] = {},
    ) -> tuple[float, list[RemoteWorker]]:
        """Return the local seconds per token, and the prefill workers. A speed that was not measured lately decays
        towards the other side's."""
        own, sent = Counter[str](), Counter[str]()
        for request in requests:
            own[request.prefiller] += request.remote_tokens
            if (
                not request.prefiller
                and request.asked > self.queue.loads.get(request.preferred, (None, 0.0))[1]
            ):
                sent[request.preferred] += request.remote_tokens
        seen = [self._seen(name, now) for name in workers]
        mean = self._local.token_seconds
        best = min((each.load.token_seconds for each in seen if each.load.token_seconds), default=None)
        known = best or mean.value or FIRST_TOKEN_SECONDS
        local = decayed(mean.value, now - mean.at, best) or known
        left = []
        for name, each in zip(workers, seen, strict=True):
            seconds = decayed(each.load.token_seconds or None, each.age, mean.value) or known
            ahead, seconds = each.left(own[name], seconds)
            left.append(RemoteWorker(name, ahead + sent[name], seconds, cached.get(name, 0)))
        return local, left

    def _queued(self, requests: Collection[DecodeRequest], prompt: int) -> float:
        """Tokens that no prefill worker has pulled. Each prompt of another decode worker, of unknown length, counts as
        this worker's average prompt."""
        own = [
            each.remote_tokens
            for each in requests
            if each.remote_tokens and not (each.prefiller or each.preferred)
        ]
        others = max(0, self.queue.depth - len(own))
        return sum(own) + others * (sum(own) / len(own) if own else prompt)

    def requests_ahead(self, flex: bool) -> list[DecodeRequest]:
        """Requests that a new one waits for. Only a flex request waits for flex requests that no engine has."""
        return [
            each
            for each in self.requests.clients()
            if flex or each.since or each.prefiller or not is_flex(each.submit.client)
        ]

    def outlook(self) -> Outlook:
        """Estimate the wait of a prompt that arrives now."""
        now, workers = self.clock(), [worker.id for worker in self.workers.available()]
        requests = self.requests_ahead(False)
        local_token, remote = self._speeds(requests, workers, now)
        local_tokens = self.prefill_tokens() + sum(request.local_tokens for request in requests)
        ways = [(local_tokens * local_token, local_token)]
        if remote:
            remote_token = 1 / sum(1 / each.token_seconds for each in remote)
            remote_tokens = self._queued(requests, MIN_MEASURED_TOKENS) + sum(each.ahead for each in remote)
            ways.append((remote_tokens * remote_token, remote_token * len(remote)))
        backlog = local_token * sum(each.local_tokens for each in requests if not each.since)
        backlog += ways[-1][1] * sum(each.remote_tokens for each in requests if not each.prefiller)
        gap = max(decayed(mean.value, now - mean.at, 0.0) or 0.0 for mean in (self._plain, self._handover))
        return Outlook(backlog, *min(ways), gap)

    @property
    def local_token_seconds(self) -> float:
        return self._local.token_seconds.value or FIRST_TOKEN_SECONDS

    def first_token(self, request: DecodeRequest, now: float) -> None:
        """Learn from a request whose first token of this engine has come."""
        if request.local_tokens:
            self._local.done(request.local_tokens, request.since, now)
        if request.decision is None or request.decision.mode == "local":
            return
        tokens, done = len(request.submit.prompt), request.outcome
        if (
            isinstance(done, PrefillDone)
            and (tokens := tokens - prefix_hit(done.handle)) >= MIN_MEASURED_TOKENS
        ):
            self._answered[request.prefiller] = done.compute_seconds / tokens, now
        if not any(other.local_tokens for other in self.requests):  # else the handover had to wait
            self._handover.learn(now - request.since, now)
