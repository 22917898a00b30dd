"""The loads under which systems are compared: each of them measures a system that runs, in its turn."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from pdserve_bench.client import Exchange
from pdserve_bench.endpoint import Endpoint, Prompts
from pdserve_bench.goodput.measure import FoundGoodput, GoodputOptions, expected_seconds, find_goodput
from pdserve_bench.goodput.requests import PoissonRequests
from pdserve_bench.load import ClosedLoop
from pdserve_bench.multi_round.workload import MultiRound
from pdserve_bench.progress import Schedule
from pdserve_bench.runs import LoadRun
from pdserve_bench.systems.measurement import REMOTE, Window, tokens_between, window_figures

GOODPUT = "goodput, requests/s"
_TIMEOUT = 60.0
"""seconds for a request of a closed loop"""
_LONGER = 4.0
"""times its warm-up, at most, that a closed loop warms up: until each of its clients has had an answer"""


@dataclass
class LoadTurn:
    """What a load is given for a turn, and what it has seen in it, filled while it runs."""

    endpoint: Endpoint
    prompts: Prompts
    window: Window
    """to be opened once the load is steady"""
    schedule: Schedule
    phase: str
    """announced with the load's seconds, and gone through by the load"""
    run: LoadRun = field(default_factory=LoadRun)
    """all requests, also those of the warm-up"""
    figures: dict[str, float] = field(default_factory=dict)
    tokens: float = 0.0
    """that came in the window"""

    def count_tokens(self) -> None:
        self.tokens = tokens_between(self.run.exchanges, self.window.began, self.window.ended)

    def count_remote(self) -> None:
        placed = [exchange.prefill for exchange in self.run.exchanges if exchange.prefill]
        if placed:
            self.figures[REMOTE] = placed.count("remote") / len(placed)


class SystemLoad(ABC):
    name: str
    """short: it stands in tables"""
    told: str
    seconds: float
    """that a turn takes, about"""

    @abstractmethod
    async def measure(self, turn: LoadTurn) -> None:
        """Warm up, open the window, close it, and wait for the last answers. Raises Unavailable. All requests are in
        `turn` also where this is cancelled."""


class ClosedLoad(SystemLoad):
    """So many clients, each of which asks again when it has its answer; every prompt is new."""

    def __init__(
        self, clients: int, prompt_tokens: int, output_tokens: int, warm_up: float, window: float
    ) -> None:
        self.name = f"c={clients}"
        self.told = (
            f"{clients} client{'s' * (clients > 1)} in a closed loop, new prompts of {prompt_tokens} tokens, "
            f"{output_tokens} tokens out"
        )
        self.seconds = warm_up + window + 1.0
        self.clients, self._warm_up, self._window = clients, warm_up, window
        self._tokens = prompt_tokens, output_tokens

    async def measure(self, turn: LoadTurn) -> None:
        async def send(exchange: Exchange) -> None:
            await turn.endpoint.ask(exchange, _TIMEOUT)

        with turn.schedule.phase(turn.phase, self.seconds):
            async with ClosedLoop(self._requests(turn), send, self.clients) as loop:
                await asyncio.sleep(self._warm_up)
                with suppress(TimeoutError):
                    async with asyncio.timeout((_LONGER - 1) * self._warm_up):
                        await loop.until(lambda _: True, self.clients)
                turn.window.open()
                await asyncio.sleep(self._window)
                turn.window.close()
        turn.run.ended = time.monotonic()
        turn.figures |= window_figures(turn.run.exchanges, turn.window.began, turn.window.ended)
        turn.count_tokens()

    def _requests(self, turn: LoadTurn) -> Iterator[Exchange]:
        prompt_tokens, output_tokens = self._tokens
        while True:
            exchange = Exchange(turn.endpoint.body(turn.prompts.of(prompt_tokens), output_tokens))
            turn.run.exchanges.append(exchange)
            yield exchange


class MultiRoundLoad(SystemLoad):
    """Users that come back with a longer chat: what prefix caches are for. Other texts in each turn."""

    name = "multi-round"

    def __init__(self, seconds: float, seed: int) -> None:
        self._seconds, self._seed = seconds, seed
        example = MultiRound(seconds=seconds)
        self.told = (
            f"multi-round QA for {seconds:g} s: {example.num_users:g} users, {example.num_rounds} rounds, "
            f"{example.rate:g} questions/s, {example.shared_system_prompt} + {example.user_history_prompt} words, "
            f"{example.answer_len} tokens out"
        )
        self.seconds = seconds + 4.0

    async def measure(self, turn: LoadTurn) -> None:
        self._seed += 1
        workload = MultiRound(seconds=self._seconds, seed=self._seed)
        with turn.schedule.phase(turn.phase, self.seconds):
            turn.window.open()
            await workload.run(turn.endpoint, turn.run)
            turn.window.close()
        turn.figures |= turn.run.summary()
        turn.count_remote()
        turn.count_tokens()


class GoodputLoad(SystemLoad):
    """The highest rate of single requests, arriving at random, at which 90 % keep the SLO."""

    name = "goodput"

    def __init__(self, options: GoodputOptions, prompt_tokens: int, output_tokens: int) -> None:
        self._options, self._tokens = options, (prompt_tokens, output_tokens)
        self.told = f"the highest rate at which {100 * options.share:g} % keep {options.slo}"
        self.seconds = expected_seconds(options)

    async def measure(self, turn: LoadTurn) -> None:
        found = FoundGoodput(self._options)
        users = PoissonRequests(turn.prompts, *self._tokens)
        turn.window.open()
        try:
            await find_goodput(turn.endpoint, users, found, turn.schedule, turn.phase)
        finally:
            turn.window.close()
            for probe in found.probes:
                turn.run.exchanges += probe.run.exchanges
            turn.run.ended = time.monotonic()
        turn.figures[GOODPUT] = found.estimate or 0.0
        turn.count_remote()
        turn.count_tokens()
