"""Multi-round QA: users join over time, hold a chat of several rounds each, and leave.

A user asks every `interval = users / qps` seconds, so a chat lasts `interval x (rounds - 1)`. To keep `users` active,
one joins every `(rounds - 1) / qps` seconds. Together they ask `qps x rounds / (rounds - 1)` questions a second: 1.5
times `qps` with three rounds. This arithmetic is that of multi-round-qa of vLLM's production stack, with which
published figures were made.
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
"""Words of one token in most vocabularies."""


class Visit(NamedTuple):
    """A user's chat."""

    user: int
    at: float
    """When the user's first question of the run is due, in seconds after the start."""
    first_round: int
    """1, or later for a user that was active before the start."""


@dataclass(eq=False)
class Question(Exchange):
    user: int = 0
    round: int = 0
    """1 is the user's first question in this run; later ones may have prefix hits."""
    late: float = 0.0
    """Seconds of delay caused by this program."""
    held: float = 0.0
    """Seconds of delay because the previous response was late."""


@dataclass(frozen=True)
class MultiRound:
    """The settings of such a run; a `Workload` (`measure/runs.py`)."""

    num_users: int = 20
    """Active at a time."""
    num_rounds: int = 3
    qps: float = 10.0
    """Each user asks every `num_users / qps` seconds; `rate` is the total."""
    shared_system_prompt: int = 200
    """Words, about one token each."""
    user_history_prompt: int = 400
    """Words."""
    answer_len: int = 40
    seconds: float = 40.0
    """No question starts later."""
    patience: float = 30.0
    """Seconds to wait for the last responses; the rest stays unfinished."""
    timeout: float = 120.0
    seed: int = 1

    @property
    def interval(self) -> float:
        """Seconds between two questions of a user."""
        return self.num_users / self.qps

    @property
    def joining(self) -> float:
        """Seconds between two joining users."""
        return max(1, self.num_rounds - 1) / self.qps

    @property
    def rate(self) -> float:
        """Questions per second of all users, if responses arrive within the interval."""
        return self.num_rounds / self.joining

    @property
    def longest_chat(self) -> int:
        """Approximate tokens of a chat's last prompt and its response."""
        round_ = _QUESTION_TOKENS + self.answer_len
        return self.shared_system_prompt + self.user_history_prompt + self.num_rounds * round_

    def visits(self) -> Iterator[Visit]:
        """Yield visits in order of time, without end, as in a steady state: some chats began before the start. In
        each interval of `joining` seconds, one user joins, at a random moment."""
        dice = Random(f"{self.seed} arrivals")
        early = list[tuple[float, int]]()
        for place in range(-int(self.interval * (self.num_rounds - 1) / self.joining) - 1, 0):
            joined = (place + dice.random()) * self.joining
            asked = int(-joined / self.interval) + 1
            if asked < self.num_rounds:
                early.append((joined + asked * self.interval, asked + 1))
        joining = (((place + dice.random()) * self.joining, 1) for place in count())
        for user, (at, first_round) in enumerate(heapq.merge(sorted(early), joining), 1):
            yield Visit(user, at, first_round)

    async def run(self, endpoint: Endpoint, run: LoadRun) -> None:
        """Sends `Question`s. Sets `began`, `asks_until` and `ended` of the run."""
        users = _Users(self, replace(endpoint, chat=True), run)
        run.began = time.monotonic()
        run.asks_until = run.began + self.seconds
        try:
            async with asyncio.timeout(self.seconds + self.patience):
                await users.come()
        except TimeoutError:
            pass  # unanswered requests stay unfinished
        finally:
            run.ended = time.monotonic()


class Texts:
    """The texts of one run. Another seed gives texts that differ from the first word on, so that no prefix cache has
    them."""

    def __init__(self, shared: int, history: int, seed: int) -> None:
        """`shared`: words of the common system prompt; `history`: words of each user's own history."""
        self._seed, self._history = seed, history
        self._shared = self._words("shared", shared)

    def first(self, user: int) -> str:
        """Return the start of a user's first message: the common prompt, then the history."""
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
            if not question.error:  # a failed question leaves no trace in the chat
                messages, opening = [*said, {"role": "assistant", "content": question.answer}], ""


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))
