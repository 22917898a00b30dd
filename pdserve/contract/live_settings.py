"""Live settings: values that `pdserve set` changes in a running graph. Pure.

They are texts in the registry and override the file's values."""

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from pdserve.contract.slo import DURATION, OFF, SloTargets, format_duration, parse_duration, tightest_slo

RouterPolicy = Literal["round-robin", "least-loaded", "kv"]
POLICIES: tuple[str, ...] = get_args(RouterPolicy)
PrefillPolicy = Literal["threshold", "adaptive"]
PREFILL_POLICIES: tuple[str, ...] = get_args(PrefillPolicy)
THRESHOLDS = ("max-local-prefill-length", "max-prefill-queue-size")
"""Keys that imply the policy `threshold` if no policy is set."""
MAX_THRESHOLD = 2**31 - 1
"""Largest value of a threshold (tokens or requests)."""

SETTINGS = {
    "policy": f"how a decode worker chooses local or remote prefill: {', '.join(PREFILL_POLICIES)}",
    "max-local-prefill-length": "tokens; prompts with more uncached tokens are prefilled remotely",
    "max-prefill-queue-size": "requests; from this queue depth on, prefill locally",
    "router": f"how frontends choose a decode worker: {', '.join(POLICIES)}",
    "slo-ttft": f"SLO for the time to the first token, as 500ms or 2s; {OFF}: none",
    "slo-gap": f"SLO for the longest gap between two tokens, as 60ms; {OFF}: none",
}
_SLO_NAMES = ("slo-ttft", "slo-gap")
_CHOICES = {"policy": PREFILL_POLICIES, "router": POLICIES}


def value_error(name: str, text: str) -> str:
    """Return which values the setting takes if `text` is not one of them, else an empty text."""
    if name in _CHOICES:
        return "" if text in _CHOICES[name] else f"one of {', '.join(_CHOICES[name])}"
    if name in _SLO_NAMES:
        return "" if _is_slo(text) else f"{DURATION}, or {OFF}"
    digits = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_THRESHOLD))
    return "" if digits and int(text) <= MAX_THRESHOLD else f"a whole number from 0 to {MAX_THRESHOLD}"


def slo_settings(slo: SloTargets) -> dict[str, str]:
    """Return an SLO as settings."""
    return dict(zip(_SLO_NAMES, (format_duration(slo.ttft), format_duration(slo.gap)), strict=True))


def parse_slo(settings: Mapping[str, str]) -> SloTargets:
    """Return the SLO in the settings; a value that is missing or invalid means none."""
    ttft, gap = (
        parse_duration(text) if text != OFF and _is_slo(text) else None
        for text in (settings.get(name, OFF) for name in _SLO_NAMES)
    )
    return SloTargets(ttft, gap)


def _is_slo(text: str) -> bool:
    try:
        return text == OFF or parse_duration(text) > 0
    except ValueError:
        return False


def effective_slo(files: Iterable[Mapping[str, str]], live: Mapping[str, str]) -> SloTargets:
    """Return the SLO of a model now; `files` are the settings in its workers' files."""
    return parse_slo(effective_settings(slo_settings(tightest_slo(map(parse_slo, files))), live))


def effective_settings(file: Mapping[str, str], live: Mapping[str, str]) -> dict[str, str]:
    """Return the values that processes obey: those of their file, overridden by valid live ones."""
    valid = {name: live[name] for name in SETTINGS if name in live and not value_error(name, live[name])}
    if "policy" not in valid and any(name in valid for name in THRESHOLDS):
        valid["policy"] = "threshold"
    return {**file, **valid}


def merge_files(files: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Merge the settings in the files of several processes; values that differ become `1 or 2`."""
    found: dict[str, list[str]] = {}
    for file in files:
        for name, value in file.items():
            if value not in found.setdefault(name, []):
                found[name].append(value)
    return {name: " or ".join(values) for name, values in found.items()}


def explain_settings(file: Mapping[str, str], live: Mapping[str, str]) -> dict[str, str]:
    """Return a text for each setting: its value, the file's value if that differs, and why a live value has no effect.
    `file` is empty if no process runs."""
    now = effective_settings(file, live)
    return {name: _explain(name, now, file, live) for name in SETTINGS}


def list_changes(file: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    """Return a line for each setting that differs from the file or was set without effect."""
    return [
        f"{name} = {text}"
        for name, text in explain_settings(file, live).items()
        if not text.endswith("as in the file)")
    ]


def _explain(name: str, now: Mapping[str, str], file: Mapping[str, str], live: Mapping[str, str]) -> str:
    value = now.get(name, "")
    before = file.get(name)
    if name in live and (wanted := value_error(name, live[name])):
        return f"{value or '(as in the file)'}; {live[name][:40]!r}, which was set, is ignored: it takes {wanted}"
    why = ""
    if name in THRESHOLDS and name in live and now["policy"] == "adaptive":
        why = ", without effect under policy adaptive"
    elif name in live and file and before is None:
        why = ", without effect: no running process uses it"
    elif name == "policy" and name not in live and value not in ("", before):
        why = f", since {next(each for each in THRESHOLDS if each in live)} is set"
    if value in ("", before) and not why:
        return f"{value} ({'set, ' * (name in live)}as in the file)".lstrip()
    return value + (f" (file: {before})" if before not in (None, value) else "") + why
