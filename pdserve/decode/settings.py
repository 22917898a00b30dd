"""The settings of a decode worker that `pdserve set` can change while it runs."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from pdserve.config.schema import PREFILL_POLICIES, THRESHOLDS, DecodeSection

log = logging.getLogger(__name__)

MAX_THRESHOLD = 2**31 - 1
"""tokens or requests"""
_LIVE = ("policy", *THRESHOLDS)


def problem(key: str, text: str) -> str:
    """What the setting takes, if `text` is not a valid value of it; else empty."""
    if key == "policy":
        return "" if text in PREFILL_POLICIES else f"one of {', '.join(PREFILL_POLICIES)}"
    if text.isdecimal() and len(text) <= len(str(MAX_THRESHOLD)) and int(text) <= MAX_THRESHOLD:
        return ""
    return f"a whole number from 0 to {MAX_THRESHOLD}"


def thresholds(settings: DecodeSection) -> str:
    length, size = settings.max_local_prefill_length, settings.max_prefill_queue_size
    return f"max-local-prefill-length {length}, max-prefill-queue-size {size}"


class LiveSettings:
    """The YAML's settings, overridden by those of the registry. As in a file, a threshold without a policy means the
    policy `threshold`."""

    def __init__(self, config: DecodeSection) -> None:
        self._configured = self.current = config
        self._seen: dict[str, str] = {}

    def read(self, values: Mapping[str, str]) -> None:
        """Apply what `pdserve set` wrote. A deleted key falls back to the YAML's; an invalid value is logged once and
        ignored."""
        relevant = {key: values[key] for key in _LIVE if key in values}
        if relevant == self._seen:
            return
        self._seen = relevant
        found: dict[str, str] = {}
        for key, text in relevant.items():
            if wanted := problem(key, text.strip()):
                log.warning("setting %s=%.40s ignored: it takes %s", key, text, wanted)
            else:
                found[key.replace("-", "_")] = text.strip()
        policy = found.pop("policy", "threshold" if found else self._configured.policy)
        numbers = {key: int(text) for key, text in found.items()}
        self.current = replace(self._configured, policy=policy, **numbers)  # type: ignore[arg-type]
        log.info("settings now: policy %s, %s", policy, thresholds(self.current))
