"""Settings of a decode worker that `pdserve set` changes while it runs."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from pdserve.config.schema import DecodeSection
from pdserve.contract.live_settings import THRESHOLDS, effective_settings, value_error

logger = logging.getLogger(__name__)

_LIVE = ("policy", *THRESHOLDS)


def thresholds(settings: DecodeSection) -> str:
    length, size = settings.max_local_prefill_length, settings.max_prefill_queue_size
    return f"max-local-prefill-length {length}, max-prefill-queue-size {size}"


class LiveSettings:
    """Overrides the YAML's settings with those of the registry (`pdserve/contract/live_settings.py`)."""

    def __init__(self, config: DecodeSection) -> None:
        self._configured = self.current = config
        self._seen: dict[str, str] = {}

    def read(self, values: Mapping[str, str]) -> None:
        """Apply what `pdserve set` wrote. For a deleted key or an invalid value, the YAML's value applies."""
        relevant = {key: values[key] for key in _LIVE if key in values}
        if relevant == self._seen:
            return
        self._seen = relevant
        for key, text in relevant.items():
            if wanted := value_error(key, text):
                logger.warning("setting %s=%.40r ignored: it takes %s", key, text, wanted)
        now = effective_settings({}, relevant)
        numbers = {key.replace("-", "_"): int(now[key]) for key in THRESHOLDS if key in now}
        policy = now.get("policy", self._configured.policy)
        self.current = replace(self._configured, policy=policy, **numbers)  # type: ignore[arg-type]
        logger.info("settings now: policy %s, %s", policy, thresholds(self.current))
