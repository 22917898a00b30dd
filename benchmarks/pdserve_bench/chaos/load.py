"""The closed-loop load of a chaos run, with judged responses."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count

from pdserve_bench.chaos.judge import Judgement, Seen, judge, trace
from pdserve_bench.chaos.questions import Attempt, Case
from pdserve_bench.client import LoadClient
from pdserve_bench.measure.load import ClosedLoop

DYING_SECONDS = 2.0
"""Seconds after the kill of a frontend during which its port may accept connections that then break."""


class JudgedLoad(ClosedLoop[Attempt]):
    def __init__(
        self,
        url: str,
        model: str,
        cases: Iterator[Case],
        clients: int,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """A request counts as hung after `timeout` seconds."""
        super().__init__((Attempt.of(case, model) for case in cases), self._ask, clients)
        self.also_right: dict[tuple[int, ...], tuple[int, ...]] = {}
        """A second expected output by prompt; a mixture of both outputs is wrong."""
        self.urls = [url]
        """Frontends, used in turn."""
        self._timeout = timeout
        self._headers = headers
        self._serial = count()
        self._killed_at = 0.0
        self._spared: set[int] = set()

    async def _ask(self, attempt: Attempt) -> None:
        url = self.urls[next(self._serial) % len(self.urls)]
        await LoadClient(url, self._headers).ask(attempt, self._timeout)

    def frontend_dies(self, spared: set[int]) -> None:
        """Tolerate connections that this death breaks. `spared`: client ports of connections to other frontends."""
        self._killed_at, self._spared = time.monotonic(), spared

    def seen(self, fault: str, began: float) -> list[Seen]:
        """Judge all requests that have ended; `began` is when the fault began."""
        return [self._seen(attempt, fault, began) for attempt in self.done]

    def _seen(self, attempt: Attempt, fault: str, began: float) -> Seen:
        case = attempt.case
        other = self.also_right.get(case.prompt, ())[: case.max_tokens]
        if other and tuple(attempt.tokens) == other[: len(attempt.tokens)]:
            attempt.case = case = replace(case, expected=other)
        pause = attempt.longest_wait if case.stream else None
        result = judge(attempt.tokens, case.expected, attempt.error, attempt.hung)
        if result is Judgement.OK:
            return Seen(result, pause, None, attempt.request_id)
        if result is Judgement.FAILED and self._was_on_killed(attempt):
            return Seen(Judgement.APART, pause, None, attempt.request_id)
        return Seen(result, pause, trace(attempt, result, fault, began), attempt.request_id)

    def _was_on_killed(self, attempt: Attempt) -> bool:
        before = attempt.started <= self._killed_at <= attempt.ended
        there = (
            before or self._killed_at < attempt.started <= attempt.ended <= self._killed_at + DYING_SECONDS
        )
        return bool(self._killed_at) and attempt.reset and there and attempt.port not in self._spared
