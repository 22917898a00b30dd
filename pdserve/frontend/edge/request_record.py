"""The record of a finished HTTP request, and the receipt of a finished or running one: status, error, hops, SLO."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pdserve.contract.messages import Hop
from pdserve.contract.reports import Receipt
from pdserve.frontend.edge.paths import GENERATING
from pdserve.frontend.edge.request_state import CLIENT_LEFT, MAX_WHY, RequestFailure, RequestState
from pdserve.frontend.edge.response import ResponseWriter
from pdserve.observe.tracing import TracedSpan

_WRONG_REQUEST = (400, 404, 422)


@dataclass(frozen=True)
class RequestRecord:
    """A finished request, as plugins get it (`frontend/plugins.py`)."""

    receipt: Receipt
    failure: RequestFailure | None
    """Why it failed. None also if only vLLM's app knows why."""
    begun: bool
    """Whether its path generates, and its key and method were accepted."""
    started: float
    """Monotonic time of its arrival; the receipt's hops are relative to it."""
    span: TracedSpan | None

    @classmethod
    def of(cls, response: ResponseWriter, frontend: str, *, begun: bool) -> Self:
        state, receipt = response.state, receipt_of(response, frontend, time.monotonic(), running=False)
        return cls(receipt, response.failure, begun, state.started, state.span)

    @property
    def code(self) -> int:
        """The receipt's status, or 499 if the client left during the response."""
        return self.failure.status if self.failure is not None else self.receipt.status


def receipt_of(response: ResponseWriter, frontend: str, now: float, *, running: bool) -> Receipt:
    """`frontend`: instance id; `now`: monotonic."""
    state = response.state
    age, failure = now - state.started, response.failure
    # the receipt omits errors about invalid requests, because they may quote the request's text
    shown = failure is not None and failure.status not in _WRONG_REQUEST
    status, hops = response.status or (0 if running else CLIENT_LEFT), state.hops.until(now)
    if failure is not None and status and failure.status != CLIENT_LEFT:
        status = failure.status  # a stream that failed began with 200
    promise = promise_of(state, failure.status if failure is not None else status, now, running=running)
    return Receipt(
        request_id=state.request_id,
        frontend=frontend,
        path=state.path,
        age=age,
        seconds=age,
        running=running,
        model=state.model,
        key=state.key,
        status=status,
        error=failure.message[:MAX_WHY] if failure is not None and shown else "",
        prefill=state.prefill,
        reason=state.reason,
        prompt_tokens=state.prompt_tokens,
        cached_tokens=state.cached_tokens,
        output_tokens=state.output_tokens,
        ttft=state.ttft,
        retries=state.retries,
        instances=state.instances,
        hops=hops,
        trace_id=state.span.trace_id if state.span is not None else "",
        promise=promise,
        broken_by=_broken_by(promise, state, hops, now),
        longest_gap=state.longest_gap if state.promised else 0.0,
    )


def promise_of(state: RequestState, code: int, now: float, *, running: bool) -> str:
    """Return the request's `Receipt.promise`. It is empty for an invalid request, and for one whose client left before
    the promise was broken."""
    promised, generates = state.promised, state.path in GENERATING
    if not promised or not generates or (400 <= code < CLIENT_LEFT and code != 429):
        return ""
    if code == 429 or code > CLIENT_LEFT:
        return "failed"
    if promised.ttft is not None and _first_token_took(state, now) > promised.ttft:
        return "ttft"
    if promised.gap is not None and state.longest_gap > promised.gap:
        return "gap"
    return "" if running or code == CLIENT_LEFT or state.ttft is None else "kept"


def _first_token_took(state: RequestState, now: float) -> float:
    """Seconds to the first token; without one, seconds until now."""
    return now - state.started if state.ttft is None else state.ttft


def _broken_by(promise: str, state: RequestState, hops: Sequence[Hop], now: float) -> str:
    """Return the hop that took most of the TTFT or of the longest gap. `decode` counts half, because it overlaps every
    gap."""
    if promise == "ttft":
        since, until = 0.0, _first_token_took(state, now)
    elif promise == "gap":
        until = state.longest_gap_end - state.started
        since = until - state.longest_gap
    else:
        return ""

    def took(hop: Hop) -> float:
        if hop.name == "migration":  # it has no duration: it accounts for the whole interval
            return until - since if since <= hop.start <= until else 0.0
        within = min(hop.start + hop.seconds, until) - max(hop.start, since)
        return within / 2 if hop.name == "decode" else within

    longest = max(hops, key=took, default=None)
    return longest.name if longest is not None and took(longest) > 0 else ""
