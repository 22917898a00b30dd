"""Multi-round QA: users that join over time, hold a chat of several rounds each, and leave."""

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

from pdserve_bench.client import Exchange
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.multi_round.pacing import Pacing, Visit
from pdserve_bench.multi_round.texts import Texts
from pdserve_bench.runs import LoadRun

_QUESTION_TOKENS = 25
"""about: with what a chat template adds"""


@dataclass(eq=False)
class Question(Exchange):
    user: int = 0
    round: int = 0
    """1 opens its user's chat; later ones follow its answers, and may find them in a prefix cache"""
    late: float = 0.0
    """seconds after it was due, for which this program alone is to blame"""
    held: float = 0.0
    """seconds after its time, because the answer before it came only then"""


@dataclass(frozen=True)
class MultiRound:
    """A `Workload`, and `Scalable`: as many users of this kind as it takes for a rate."""

    num_users: float = 20
    num_rounds: int = 3
    qps: float = 10.0
    """sets how often each user asks (every `num_users / qps` seconds); for what they ask together see `rate`"""
    shared_system_prompt: int = 200
    """words, about a token each"""
    user_history_prompt: int = 400
    """words"""
    answer_len: int = 40
    """tokens"""
    seconds: float = 40.0
    """after these no question is asked any more"""
    patience: float = 30.0
    """seconds that the last answers are waited for after that; what has not come then stays unfinished"""
    timeout: float = 600.0
    """seconds for a request"""
    seed: int = 1
    fixed_users: bool = False
    """a user joins only where another has left, so that there are never more than `num_users`, however slow the answers
    are; else users join at their times, and there are more of them at a server that does not keep up"""

    @property
    def pacing(self) -> Pacing:
        return Pacing(self.num_users, self.num_rounds, self.qps)

    @property
    def rate(self) -> float:
        """Requests per second, as long as answers come in time: `qps x rounds / (rounds - 1)`."""
        return self.pacing.rate

    @property
    def longest_chat(self) -> int:
        """About how many tokens the last prompt of a chat and its answer have."""
        round_ = _QUESTION_TOKENS + self.answer_len
        return self.shared_system_prompt + self.user_history_prompt + self.num_rounds * round_

    def at(self, rate: float, seconds: float, seed: int) -> "MultiRound":
        scaled = self.pacing.scaled(rate)
        return replace(self, num_users=scaled.users, qps=scaled.qps, seconds=seconds, seed=seed)

    async def run(self, endpoint: Endpoint, run: LoadRun) -> None:
        """Each exchange is a `Question`. Sets when `run` began, until when it asked, and when it ended."""
        await _Users(self, replace(endpoint, chat=True), run).run()


@dataclass
class _Users:
    load: MultiRound
    endpoint: Endpoint
    run_: LoadRun
    texts: Texts = field(init=False)

    def __post_init__(self) -> None:
        load = self.load
        self.texts = Texts(load.shared_system_prompt, load.user_history_prompt, load.seed)
        places = max(1, round(load.num_users)) if load.fixed_users else 1 << 30
        self._places = asyncio.Semaphore(places)

    async def run(self) -> None:
        run, load = self.run_, self.load
        run.began = time.monotonic()
        run.asks_until = run.began + load.seconds
        try:
            async with asyncio.timeout(load.seconds + load.patience), asyncio.TaskGroup() as group:
                for visit in load.pacing.visits(load.seed):
                    if visit.at >= load.seconds:
                        break
                    await _until(run.began + visit.at)
                    await self._places.acquire()
                    group.create_task(self._chat(visit))
        except TimeoutError:
            pass  # what is not answered by now stays unfinished
        finally:
            run.ended = time.monotonic()

    async def _chat(self, visit: Visit) -> None:
        messages: list[dict[str, str]] = []
        opening, due, free = self.texts.first(visit.user), time.monotonic(), 0.0
        try:
            for number in range(visit.first_round, self.load.num_rounds + 1):
                if max(due, free) >= self.run_.asks_until:
                    return
                await _until(due)
                late, held = time.monotonic() - max(due, free), max(0.0, free - due)
                due = time.monotonic() + self.load.pacing.interval
                said = [*messages, {"role": "user", "content": opening + self.texts.question(number)}]
                place = number - visit.first_round + 1
                question = Question(self._body(said), user=visit.user, round=place, late=late, held=held)
                self.run_.exchanges.append(question)
                await self.endpoint.ask(question, self.load.timeout)
                free, question.body = time.monotonic(), {}  # histories of a long run are not kept
                if not question.error:  # else it is as if it had not been asked
                    messages, opening = [*said, {"role": "assistant", "content": question.answer}], ""
        finally:
            self._places.release()

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return self.endpoint.body(messages, self.load.answer_len)


async def _until(moment: float) -> None:
    """Monotonic. At once where it has passed."""
    await asyncio.sleep(max(0.0, moment - time.monotonic()))
