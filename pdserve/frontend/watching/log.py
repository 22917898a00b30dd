"""The log line of a request, and what is counted of it."""

import logging

from pdserve.frontend.edge.record import RequestRecord
from pdserve.frontend.ribs import Rib
from pdserve.observe.metrics import E2E, KEY_REQUESTS, KEY_TOKENS, REQUESTS

logger = logging.getLogger(__name__)


class RequestLog(Rib):
    def end(self, record: RequestRecord) -> None:
        _count(record)
        told = record.receipt
        logger.info(
            "%s %s%s model=%s code=%d tokens=%d+%d ttft=%s total=%.3f prefill=%s instance=%s",
            told.request_id,
            told.path,
            told.key and f" key={told.key}",
            told.model or "-",
            told.status,
            told.prompt_tokens,
            told.output_tokens,
            "-" if told.ttft is None else f"{told.ttft:.3f}",
            told.seconds,
            told.prefill or "-",
            ",".join(told.instances) or "-",
        )


def _count(record: RequestRecord) -> None:
    told, code = record.receipt, str(record.receipt.status)
    REQUESTS.labels(told.model, code).inc()
    if told.key:
        KEY_REQUESTS.labels(told.key, code).inc()
        KEY_TOKENS.labels(told.key, "prompt").inc(told.prompt_tokens)
        KEY_TOKENS.labels(told.key, "output").inc(told.output_tokens)
    if told.ttft is not None and record.failure is None:
        E2E.labels(told.model).observe(told.seconds)
