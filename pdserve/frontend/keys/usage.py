"""Count a request against the rate limits of its API key."""

import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from pdserve.frontend.admission.wait_estimate import RequestEstimate, RequestSize
from pdserve.frontend.edge.response import ResponseWriter
from pdserve.frontend.keys.limits import KeyLedger, KeyQuota, LimitReached, in_words
from pdserve.util import clock


class KeyUse:
    """One request, from its head to the end of its response. Entering counts the request, `reserve` counts its expected
    tokens, and leaving replaces these by its actual tokens. A request that the graph did not serve (429, 503) does not
    count. Entering and `reserve` raise LimitReached."""

    def __init__(self, ledger: KeyLedger, response: ResponseWriter) -> None:
        self._ledger = ledger
        self._response = response
        self._quota: KeyQuota | None = None
        self._reserved = 0.0
        self._too_large = False

    def __enter__(self) -> Self:
        state, now = self._response.state, time.monotonic()
        if quota := self._ledger.quota(state.key, now):
            self._quota = quota
            state.usage_headers = self._headers
            quota.begin(now)
        return self

    def reserve(self, size: RequestSize, max_model_len: int) -> None:
        if quota := self._quota:
            most = RequestEstimate.output_tokens if size.max_tokens is None else size.max_tokens
            prompts = size.within(max_model_len).prompt_tokens
            tokens = prompts + size.sequences * min(most, max_model_len)
            try:
                quota.take("tokens", tokens, time.monotonic())
            except LimitReached as error:
                self._too_large = not error.retry_after
                raise
            self._reserved = tokens

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if quota := self._quota:
            now, done = time.monotonic(), self._response.state
            quota.running -= 1
            quota.count("tokens", done.prompt_tokens + done.output_tokens - self._reserved, now)
            if getattr(error, "status", self._response.status) in (429, 503):
                quota.count("requests", -1, now)

    def _headers(self) -> Mapping[str, str]:
        """Return what the limits leave, in OpenAI's headers or in Anthropic's."""
        assert self._quota is not None
        headers = {"x-should-retry": "false"} if self._too_large else {}
        anthropic = self._response.state.path.startswith("/v1/messages")
        for kind, limit, left, reset in self._quota.state(time.monotonic()):
            if anthropic:
                at = datetime.fromtimestamp(math.ceil(clock.unix() + reset), UTC)
                headers[f"anthropic-ratelimit-{kind}-limit"] = str(limit)
                headers[f"anthropic-ratelimit-{kind}-remaining"] = str(left)
                headers[f"anthropic-ratelimit-{kind}-reset"] = f"{at:%Y-%m-%dT%H:%M:%SZ}"
            else:
                headers[f"x-ratelimit-limit-{kind}"] = str(limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(left)
                headers[f"x-ratelimit-reset-{kind}"] = in_words(reset)
        return headers
