"""Log and count each finished request."""

import logging

from pdserve.frontend.edge.request_record import RequestRecord
from pdserve.frontend.plugins import Plugin
from pdserve.observe.metrics import E2E, KEY_REQUESTS, KEY_TOKENS, REQUESTS, SLO

logger = logging.getLogger(__name__)


class RequestLog(Plugin):
    def end(self, record: RequestRecord) -> None:
        _count(record)
        receipt = record.receipt
        logger.info(
            "%s %s%s model=%s code=%d tokens=%d+%d ttft=%s total=%.3f prefill=%s instance=%s",
            receipt.request_id,
            receipt.path,
            receipt.key and f" key={receipt.key}",
            receipt.model or "-",
            receipt.status,
            receipt.prompt_tokens,
            receipt.output_tokens,
            "-" if receipt.ttft is None else f"{receipt.ttft:.3f}",
            receipt.seconds,
            receipt.prefill or "-",
            ",".join(receipt.instances) or "-",
        )


def _count(record: RequestRecord) -> None:
    receipt, code = record.receipt, str(record.receipt.status)
    REQUESTS.labels(receipt.model, code).inc()
    if receipt.key:
        KEY_REQUESTS.labels(receipt.key, code).inc()
        KEY_TOKENS.labels(receipt.key, "prompt").inc(receipt.prompt_tokens)
        KEY_TOKENS.labels(receipt.key, "output").inc(receipt.output_tokens)
    if receipt.promise:
        SLO.labels(receipt.model, receipt.promise).inc()
    if receipt.ttft is not None and record.failure is None:
        E2E.labels(receipt.model).observe(receipt.seconds)
