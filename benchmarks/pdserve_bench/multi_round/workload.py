"""Multi-round QA: users that join over time, hold a chat of several rounds each, and leave.

A user asks its questions `interval = users / qps` seconds apart, so its chat lasts `interval x (rounds - 1)`, and
then its place is free. So that `users` are there at all times, one joins every `(rounds - 1) / qps` seconds. Each
of them asks `rounds` questions: together they ask `qps x rounds / (rounds - 1)` a second, half as many again as
`qps` where a chat has three rounds. This is how multi-round-qa of vLLM's production stack counts, and how published
figures were made.
"""

import asyncio
import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import NamedTuple

from pdserve_bench.client import Exchange
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.measure.runs import LoadRun

_QUESTION_TOKENS = 25
_VOCABULARY = """
about after again all answer bird boat book bread bridge city clock cold door end first forest friend garden good house
key lake letter light long moon night old paper rain river road sea ship snow song star stone story summer tree water
"""
_WORDS = _VOCABULARY.split()
"""a token each in the vocabularies of most models, so that a prompt of so many words has about so many tokens"""


class Visit(NamedTuple):
    """A user's chat."""

    user: int
    at: float
    """seconds after the run's begin; its first question of the run is due then"""
    first_round: int
    """1, or later for a user that was already there when the run began"""


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
    """A `Workload`."""

    num_users: int = 20
    """that are there at a time"""
    num_rounds: int = 3
    qps: float = 10.0
    """sets how often each user asks (every `num_users / qps` seconds); for what they ask together see `rate`"""
    shared_system_prompt: int = 200
    """words, about a token each"""
    user_history_prompt: int = 400
    """words"""
    answer_len: int = 40
    seconds: float = 40.0
    """after these no question is asked any more"""
    patience: float = 30.0
    """seconds that the last answers are waited for after that; what has not come then stays unfinished"""
    timeout: float = 120.0
    seed: int = 1

    @property
    def interval(self) -> float:
        """Seconds between two questions of a user."""
        return self.num_users / self.qps

    @property
    def joining(self) -> float:
        """Seconds from one user to the next."""
        return max(1, self.num_rounds - 1) / self.qps

    @property
    def rate(self) -> float:
        """Questions per second of all users, as long as answers come within the interval."""
        return self.num_rounds / self.joining

    @property
    def longest_chat(self) -> int:
        """About how many tokens the last prompt of a chat and its answer have."""
        round_ = _QUESTION_TOKENS + self.answer_len
        return self.shared_system_prompt + self.user_history_prompt + self.num_rounds * round_

    def visits(self) -> Iterator[Visit]:
        """Yield visits in the order of their times, without an end, as if users had joined long before: those whose
        chats still last when the run begins come first, in the middle of their rounds, so that the rate is the same
        from the first second on. Users join evenly, each somewhere within its share of the time: the seed says where,
        so that users do not ask at the same moments for ever."""
        dice = Random(f"{self.seed} arrivals")
        early = list[tuple[float, int]]()
        for slot in range(-int(self.interval * (self.num_rounds - 1) / self.joining) - 1, 0):
            joined = (slot + dice.random()) * self.joining
            asked = int(-joined / self.interval) + 1
            if asked < self.num_rounds:
                early.append((joined + asked * self.interval, asked + 1))
        joining = (((slot + dice.random()) * self.joining, 1) for slot in count())
        for user, (at, first_round) in enumerate(heapq.merge(sorted(early), joining), 1):
            yield Visit(user, at, first_round)

    async def run(self, endpoint: Endpoint, run: LoadRun) -> None:
        """Each exchange is a `Question`. Sets when `run` began, until when it asked, and when it ended."""
        users = _Users(self, replace(endpoint, chat=True), run)
        run.began = time.monotonic()
        run.asks_until = run.began + self.seconds
        try:
            async with asyncio.timeout(self.seconds + self.patience):
                await users.come()
        except TimeoutError:
            pass  # what is not answered by now stays unfinished
        finally:
            run.ended = time.monotonic()


class Texts:
    """The texts of one run. The same seed makes the same texts; another seed makes others from the first word on, so
    that a server's prefix cache that has seen a run does not know the next."""

    def __init__(self, shared: int, history: int, seed: int) -> None:
        """So many words of the system prompt that all users share, and of each user's own history."""
        self._seed, self._history = seed, history
        self._shared = self._words("shared", shared)

    def first(self, user: int) -> str:
        """What a user's first message begins with: the prompt that all share, then what is its own."""
        history = self._words(f"user {user}", self._history)
        return f"{self._shared}. I am user {user}, and this is what we spoke about: {history}. "

    def question(self, number: int) -> str:
        return f"Question {number}: can you tell me another long story with a happy end?"

    def warm_up(self, number: int) -> str:
        return f"Warm-up {number}: {self._words(f'warm-up {number}', 100)}."

    def _words(self, purpose: str, count: int) -> str:
        return " ".join(Random(f"{self._seed} {purpose}").choices(_WORDS, k=count))


class _Users:
    def __init__(self, load: MultiRound, endpoint: Endpoint, run: LoadRun) -> None:
        self._load, self._endpoint, self._run = load, endpoint, run
        self._texts = Texts(load.shared_system_prompt, load.user_history_prompt, load.seed)

    async def come(self) -> None:
        """Run all visits, until the last user has left."""
        async with asyncio.TaskGroup() as group:
            for visit in self._load.visits():
                if visit.at >= self._load.seconds:
                    break
                due = self._run.began + visit.at
                await _until(due)
                group.create_task(self._chat(visit, due))

    async def _chat(self, visit: Visit, due: float) -> None:
        load, free = self._load, 0.0
        messages: list[dict[str, str]] = []
        opening = self._texts.first(visit.user)
        for number in range(visit.first_round, load.num_rounds + 1):
            if max(due, free) >= self._run.asks_until:
                return
            await _until(due)
            late, held = time.monotonic() - max(due, free), max(0.0, free - due)
            due = time.monotonic() + load.interval
            said = [*messages, {"role": "user", "content": opening + self._texts.question(number)}]
            body, place = self._endpoint.body(said, load.answer_len), number - visit.first_round + 1
            question = Question(body, user=visit.user, round=place, late=late, held=held)
            self._run.exchanges.append(question)
            await self._endpoint.ask(question, load.timeout)
            free, question.body = time.monotonic(), {}  # histories of a long run are not kept
            if not question.error:  # else it is as if it had not been asked
                messages, opening = [*said, {"role": "assistant", "content": question.answer}], ""


async def _until(moment: float) -> None:
    """Monotonic. At once where it has passed."""
    await asyncio.sleep(max(0.0, moment - time.monotonic()))
