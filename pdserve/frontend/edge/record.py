"""What became of one HTTP request."""

import time
from dataclasses import dataclass
from typing import Self

from pdserve.frontend.edge.answer import ResponseWriter
from pdserve.frontend.edge.trace import CLIENT_LEFT, MAX_WHY, RequestFailure
from pdserve.observe.tracing import TracedSpan
from pdserve.watch import Receipt

_WRONG_REQUEST = (400, 404, 422)


@dataclass(frozen=True)
class RequestRecord:
    """Made once, when the request is over, for all that watches requests (`frontend/ribs.py`)."""

    receipt: Receipt
    """what may be shown of it, beside its key and its text"""
    failure: RequestFailure | None
    """why it failed; None also where only the model's app knows"""
    begun: bool
    """whether it got past its key and its path, to a model that generates"""
    started: float
    """monotonic: what the receipt's hops count from"""
    span: TracedSpan | None

    @classmethod
    def of(cls, response: ResponseWriter, frontend: str, *, begun: bool) -> Self:
        trace, receipt = response.trace, receipt_of(response, frontend, time.monotonic(), running=False)
        return cls(receipt, response.failure, begun, trace.started, trace.span)

    @property
    def code(self) -> int:
        """Its HTTP status, or that of the error in its stream."""
        return self.failure.status if self.failure is not None else self.receipt.status


def receipt_of(response: ResponseWriter, frontend: str, now: float, *, running: bool) -> Receipt:
    """`frontend`: instance id; `now`: monotonic."""
    trace = response.trace
    age, failure = now - trace.started, response.failure
    # an error about a wrong request may quote it, and its client has it
    shown = failure is not None and failure.status not in _WRONG_REQUEST
    return Receipt(
        request_id=trace.request_id,
        frontend=frontend,
        path=trace.path,
        age=age,
        seconds=age,
        running=running,
        model=trace.model,
        key=trace.key,
        status=response.status or (0 if running else CLIENT_LEFT),
        error=failure.message[:MAX_WHY] if failure is not None and shown else "",
        prefill=trace.prefill,
        reason=trace.reason,
        prompt_tokens=trace.prompt_tokens,
        cached_tokens=trace.cached_tokens,
        output_tokens=trace.output_tokens,
        ttft=trace.ttft,
        retries=trace.retries,
        instances=trace.instances,
        hops=trace.hops.until(now),
        trace_id=trace.span.trace_id if trace.span is not None else "",
    )
