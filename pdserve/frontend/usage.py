"""What a request uses of its API key's limits, and how the frontends tell each other what was used."""

import math
import time
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from pdserve import clock
from pdserve.frontend.admission.estimate import RequestEstimate, RequestSize
from pdserve.frontend.answer import ResponseWriter
from pdserve.frontend.limits import KeyLedger, KeyQuota, LimitReached, in_words


class KeyUse:
    """One request, from its head to the end of its answer, background work included. Entering counts it; `reserve`
    counts its tokens as they may become, and leaving as they were. What the graph did not serve (429, 503) does not
    count. Entering and `reserve` raise LimitReached."""

    def __init__(self, ledger: KeyLedger, response: ResponseWriter) -> None:
        self._ledger = ledger
        self._response = response
        self._quota: KeyQuota | None = None
        self._reserved = 0.0

    def __enter__(self) -> Self:
        trace = self._response.trace
        if quota := self._ledger.quota(trace.key):
            self._quota = quota
            try:
                quota.begin(self._ledger.elsewhere(trace.key), time.monotonic())
            finally:
                self._tell(quota)
        return self

    def reserve(self, size: RequestSize, max_model_len: int) -> None:
        if quota := self._quota:
            most = RequestEstimate.output_tokens if size.max_tokens is None else size.max_tokens
            tokens = size.prompt_tokens + size.sequences * min(most, max_model_len)
            try:
                quota.take("tokens", tokens, time.monotonic())
            except LimitReached as error:
                if not error.retry_after:
                    self._response.trace.headers["x-should-retry"] = "false"
                raise
            finally:
                self._tell(quota)
            self._reserved = tokens

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if quota := self._quota:
            now, done = time.monotonic(), self._response.trace
            quota.running -= 1
            quota.count("tokens", done.prompt_tokens + done.output_tokens - self._reserved, now)
            if getattr(error, "status", self._response.status) in (429, 503):
                quota.count("requests", -1, now)

    def _tell(self, quota: KeyQuota) -> None:
        """As headers of the answer: OpenAI's, or Anthropic's."""
        trace = self._response.trace
        for kind, limit, left, reset in quota.state(time.monotonic()):
            if trace.path.startswith("/v1/messages"):
                at = datetime.fromtimestamp(math.ceil(clock.unix() + reset), UTC)
                told = {"limit": str(limit), "remaining": str(left), "reset": f"{at:%Y-%m-%dT%H:%M:%SZ}"}
                trace.headers |= {f"anthropic-ratelimit-{kind}-{name}": value for name, value in told.items()}
            else:
                told = {"limit": str(limit), "remaining": str(left), "reset": in_words(reset)}
                trace.headers |= {f"x-ratelimit-{name}-{kind}": value for name, value in told.items()}
