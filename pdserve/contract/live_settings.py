"""Live settings: what `pdserve set` changes in a running graph, and what of it is in force. Pure.

They are keys in the registry, as text, and win over the values of the file. As in a file, a threshold without a policy
means the policy `threshold`."""

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from pdserve.contract.slo import DURATION, OFF, SloTargets, format_duration, parse_duration, tightest_slo

RouterPolicy = Literal["round-robin", "least-loaded", "kv"]
POLICIES: tuple[str, ...] = get_args(RouterPolicy)
PrefillPolicy = Literal["threshold", "adaptive"]
PREFILL_POLICIES: tuple[str, ...] = get_args(PrefillPolicy)
THRESHOLDS = ("max-local-prefill-length", "max-prefill-queue-size")
"""keys that imply the policy `threshold` if no policy is set"""
MAX_THRESHOLD = 2**31 - 1
"""tokens or requests"""

SETTINGS = {
    "policy": f"which way a prompt goes: {', '.join(PREFILL_POLICIES)}",
    "max-local-prefill-length": "tokens; a prompt with more than these to compute goes to a prefill worker",
    "max-prefill-queue-size": "requests; with these many waiting, prefill locally",
    "router": f"how frontends choose a decode worker: {', '.join(POLICIES)}",
    "slo-ttft": f"the promised time to the first token, as 500ms or 2s; {OFF}: none",
    "slo-gap": f"the promised longest gap between two tokens, as 60ms; {OFF}: none",
}
_PROMISES = ("slo-ttft", "slo-gap")
_CHOICES = {"policy": PREFILL_POLICIES, "router": POLICIES}


def value_error(name: str, text: str) -> str:
    """Return what the setting takes, if `text` is not a valid value of it; else empty."""
    if name in _CHOICES:
        return "" if text in _CHOICES[name] else f"one of {', '.join(_CHOICES[name])}"
    if name in _PROMISES:
        return "" if _is_promise(text) else f"{DURATION}, or {OFF}"
    digits = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_THRESHOLD))
    return "" if digits and int(text) <= MAX_THRESHOLD else f"a whole number from 0 to {MAX_THRESHOLD}"


def slo_settings(promised: SloTargets) -> dict[str, str]:
    """Return the promise of a file as settings."""
    return dict(zip(_PROMISES, (format_duration(promised.ttft), format_duration(promised.gap)), strict=True))


def parse_slo(settings: Mapping[str, str]) -> SloTargets:
    """Return the promise that the settings make; what is missing or not valid promises nothing."""
    ttft, gap = (
        parse_duration(text) if text != OFF and _is_promise(text) else None
        for text in (settings.get(name, OFF) for name in _PROMISES)
    )
    return SloTargets(ttft, gap)


def _is_promise(text: str) -> bool:
    try:
        return text == OFF or parse_duration(text) > 0
    except ValueError:
        return False


def effective_slo(files: Iterable[Mapping[str, str]], live: Mapping[str, str]) -> SloTargets:
    """Return what is promised to the clients of a model; `files`: the settings of its workers."""
    return parse_slo(effective_settings(slo_settings(tightest_slo(map(parse_slo, files))), live))


def effective_settings(file: Mapping[str, str], live: Mapping[str, str]) -> dict[str, str]:
    """Return the values that processes go by; `file` has those of their file."""
    valid = {name: live[name] for name in SETTINGS if name in live and not value_error(name, live[name])}
    if "policy" not in valid and any(name in valid for name in THRESHOLDS):
        valid["policy"] = "threshold"
    return {**file, **valid}


def merge_files(files: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Merge what the files of several processes say."""
    found: dict[str, list[str]] = {}
    for file in files:
        for name, value in file.items():
            if value not in found.setdefault(name, []):
                found[name].append(value)
    return {name: " or ".join(values) for name, values in found.items()}


def explain_settings(file: Mapping[str, str], live: Mapping[str, str]) -> dict[str, str]:
    """Return the value of each setting, with the file's where that differs and why it has no effect or was not set
    itself. `file` is empty where no process runs."""
    now = effective_settings(file, live)
    return {name: _explained(name, now, file, live) for name in SETTINGS}


def list_changes(file: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    """Return a line for each setting that is not as in the file, or that was set without effect."""
    return [
        f"{name} = {text}"
        for name, text in explain_settings(file, live).items()
        if not text.endswith("as in the file)")
    ]


def _explained(name: str, now: Mapping[str, str], file: Mapping[str, str], live: Mapping[str, str]) -> str:
    value, before = now.get(name, ""), file.get(name)
    if name in live and (wanted := value_error(name, live[name])):
        return f"{value or '(as in the file)'}; {live[name][:40]!r}, which was set, is ignored: it takes {wanted}"
    why = ""
    if name in THRESHOLDS and name in live and now["policy"] == "adaptive":
        why = ", without effect under policy adaptive"
    elif name in live and file and before is None:
        why = ", without effect: no process that runs goes by it"
    elif name == "policy" and name not in live and value not in ("", before):
        why = f", since {next(each for each in THRESHOLDS if each in live)} is set"
    if value in ("", before) and not why:
        return f"{value} ({'set, ' * (name in live)}as in the file)".lstrip()
    return value + (f" (file: {before})" if before not in (None, value) else "") + why
