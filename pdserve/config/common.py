"""The Common section: a store of keys that other sections pull by name."""

from pdserve.config.findings import Findings, or_nearest
from pdserve.config.keys import Keys
from pdserve.config.tree import Entry


class Common:
    def __init__(self, entry: Entry | None, findings: Findings) -> None:
        self._findings = findings
        Keys.of(entry, "Common", findings)  # says so where Common is not a mapping
        self._entries = entry.children if entry else {}
        self._pulled: set[str] = set()

    def pull_into(self, keys: Keys, section: Entry | None) -> Keys:
        """Adds what the section's `common-configs` lists and the section does not set itself; returns
        `keys`."""
        listed = section.children.get("common-configs") if section else None
        if listed is None:
            return keys
        if not isinstance(listed.value, list) or not all(isinstance(each, str) for each in listed.value):
            text = "must be a list of keys of Common, as in [model, block-size]."
            self._findings.problem(listed.line, listed.path, text)
            return keys
        for written in listed.value:
            self._pull(written, keys, listed)
        return keys

    def _pull(self, written: str, keys: Keys, listed: Entry) -> None:
        name = written.replace("_", "-")
        entry = self._entries.get(name)
        if entry is None:
            hint = or_nearest(name, self._entries, f"add {name} to Common, or take it off the list.")
            text = f"lists {written}, which Common does not have: {hint}"
            self._findings.problem(listed.line, listed.path, text)
            return
        self._pulled.add(name)
        keys.offer(name, entry)

    def check_unused(self) -> None:
        """As in Dynamo, what nobody lists has no effect; nobody writes it for that."""
        for name, entry in self._entries.items():
            if name not in self._pulled:
                text = f"has no effect: list {name} in the common-configs of a section, or remove it."
                self._findings.problem(entry.line, entry.path, text)
