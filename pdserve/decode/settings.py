"""The thresholds in force: the YAML's, unless the registry has newer ones."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from pdserve.config.schema import DecodeConfig
from pdserve.decode.policy import PolicySettings

log = logging.getLogger(__name__)

_LIVE = {
    "max-local-prefill-length": "max_local_prefill_length",
    "max-prefill-queue-size": "max_prefill_queue_size",
}


MAX_THRESHOLD = 2**31 - 1
"""tokens or requests"""


def is_threshold(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(MAX_THRESHOLD)) and int(text) <= MAX_THRESHOLD


class LiveSettings:
    def __init__(self, config: DecodeConfig) -> None:
        self._configured = self.current = PolicySettings(
            remote_prefill=config.remote_prefill,
            conditional_disagg=config.conditional_disagg,
            max_local_prefill_length=config.max_local_prefill_length,
            max_prefill_queue_size=config.max_prefill_queue_size,
        )
        self._seen: dict[str, str] = {}

    def read(self, values: Mapping[str, str]) -> None:
        """Take over what `pdserve set` wrote. A key that is gone falls back to the YAML; a value that is
        not a whole number from 0 is logged once and changes nothing."""
        relevant = {key: values[key] for key in _LIVE if key in values}
        if relevant == self._seen:
            return
        self._seen = relevant
        numbers: dict[str, int] = {}
        for key, text in relevant.items():
            if is_threshold(text.strip()):
                numbers[_LIVE[key]] = int(text)
            else:
                log.warning(
                    "setting %s=%.40s ignored: it takes a whole number from 0 to %d", key, text, MAX_THRESHOLD
                )
        self.current = replace(self._configured, **numbers)  # type: ignore[arg-type]
        log.info(
            "thresholds now: max-local-prefill-length %d, max-prefill-queue-size %d",
            self.current.max_local_prefill_length,
            self.current.max_prefill_queue_size,
        )
