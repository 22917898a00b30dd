"""Reads one mapping's own keys with their types; what nobody asked for is left over and is either an engine
argument or unknown."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from pdserve.config.findings import Findings, or_nearest
from pdserve.config.tree import Entry

HOMES = {
    "namespace": "Graph",
    "nats": "Graph",
    "etcd": "Graph",
    "state-dir": "Graph",
    "kv-port": "Graph",
    "request-timeout": "Graph",
    "drain-timeout": "Graph",
    "host": "Graph or Frontend",
    "port": "Frontend",
    "served-model-name": "Frontend",
    "endpoint": "Frontend",
    "header-timeout": "Frontend",
    "write-timeout": "Frontend",
    "max-request-timeout": "Frontend",
    "max-wait": "Frontend",
    "max-waiting": "Frontend",
    "max-waiting-tokens": "Frontend",
    "max-outputs": "Frontend",
    "router": "Processor",
    "remote-prefill": "VllmWorker",
    "conditional-disagg": "VllmWorker",
    "max-local-prefill-length": "VllmWorker",
    "max-prefill-queue-size": "VllmWorker",
    "engine": "VllmWorker or PrefillWorker",
    "ServiceArgs": "Frontend, Processor, VllmWorker or PrefillWorker",
    "common-configs": "Processor, VllmWorker or PrefillWorker",
}
"""sections of our own keys, for whoever writes one in the wrong place"""


class Keys:
    """One section, or a mapping inside of one. A key with a problem reads as its default: loading fails at
    the end."""

    def __init__(self, path: str, line: int, entries: Mapping[str, Entry], findings: Findings) -> None:
        self.path, self.line, self.findings = path, line, findings
        self._left = dict(entries)
        self._asked: list[str] = []

    @classmethod
    def of(cls, entry: Entry | None, path: str, findings: Findings) -> "Keys":
        """An absent entry, or one with nothing under it, has no keys; anything but a mapping is a problem."""
        if entry is not None and entry.value is not None and not isinstance(entry.value, dict):
            findings.problem(entry.line, entry.path, "must be a mapping: indent `key: value` lines under it.")
        return cls(path, entry.line if entry else 0, entry.children if entry else {}, findings)

    def offer(self, name: str, entry: Entry) -> None:
        """A key from elsewhere, which counts where the section does not set it itself."""
        self._left.setdefault(name, entry)

    def take(self, name: str) -> Entry | None:
        self._asked.append(name)
        return self._left.pop(name, None)

    def text(self, name: str, default: Any, check: Callable[[str], str | None] = lambda _: None) -> Any:
        """`check` says what is wrong with a text, as the end of a sentence."""
        entry = self.take(name)
        if entry is None:
            return default
        if not isinstance(entry.value, str) or not entry.value.strip():
            return self._wrong(entry, "must be a text", default)
        if wrong := check(entry.value):
            self.findings.problem(entry.line, entry.path, wrong)
        return entry.value

    def integer(self, name: str, default: Any, minimum: int, maximum: int | None = None) -> Any:
        entry = self.take(name)
        if entry is None:
            return default
        value = entry.value
        upto = "or more" if maximum is None else f"to {maximum}"
        good = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        if not good or (maximum is not None and value > maximum):  # type: ignore[operator]
            return self._wrong(entry, f"must be a whole number, {minimum} {upto}", default)
        return value

    def seconds(self, name: str, default: float, *, zero: bool = False) -> float:
        entry = self.take(name)
        if entry is None:
            return default
        value = entry.value
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (value == 0 and not zero):  # type: ignore[operator]
            return float(self._wrong(entry, "must be a number of seconds above 0", default))
        return float(value)  # type: ignore[arg-type]

    def flag(self, name: str, default: bool) -> bool:
        entry = self.take(name)
        if entry is None:
            return default
        if not isinstance(entry.value, bool):
            return bool(self._wrong(entry, "must be true or false", default))
        return entry.value

    def choice(self, name: str, default: str, valid: tuple[str, ...]) -> str:
        entry = self.take(name)
        if entry is None:
            return default
        if entry.value not in valid:
            return str(self._wrong(entry, f"must be one of: {', '.join(valid)}", default))
        return str(entry.value)

    def inside(self, name: str) -> "Keys":
        return Keys.of(self.take(name), f"{self.path}.{name}", self.findings)

    def rest(self) -> list[Entry]:
        """What nobody took, and takes it."""
        left, self._left = list(self._left.values()), {}
        return left

    def done(self, also: tuple[str, ...] = ()) -> None:
        """Everything left is unknown; `also` are further valid names to suggest."""
        for entry in self.rest():
            self.unknown(entry, also)

    def unknown(self, entry: Entry, also: tuple[str, ...] = (), beside: str = "") -> None:
        name = entry.path.rsplit(".", 1)[-1].replace("_", "-")
        valid = [*self._asked, *also]
        owner = self.path or "the file"
        if name in HOMES and name not in valid:
            text = f"is not a key of {owner}: move it to {HOMES[name]}."
        else:
            otherwise = f"remove it, or use one of: {', '.join(self._asked)}."
            text = f"is neither a key of {owner}{beside}: {or_nearest(name, valid, otherwise)}"
            text = text if beside else text.replace("neither", "not")
        self.findings.problem(entry.line, entry.path, text)

    def _wrong(self, entry: Entry, what: str, default: Any) -> Any:
        self.findings.problem(entry.line, entry.path, f"is {_shown(entry.value)}, but {what}.")
        return default


def _shown(value: object) -> str:
    return "empty" if value is None else repr(value)
