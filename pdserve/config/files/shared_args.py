"""Checks vLLM arguments that decode and prefill workers share.

Some must be equal, because decode workers read the prefill workers' KV. Others are copied from decode workers, so that
a stand-in gives the same responses.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pdserve.config.engine_args.arguments import (
    RESPONSE_ARGUMENTS,
    SPECULATION_ARGUMENTS,
    arguments,
    draft_model,
)
from pdserve.config.files.yaml_tree import Entry, Findings
from pdserve.config.lora_modules import LORA_ARGUMENTS
from pdserve.config.schema import PrefillSection
from pdserve.config.sections import SectionRead

Arguments = dict[str, Entry]
"""a section's vLLM arguments by canonical name"""

_MUST_BE_EQUAL = {
    **dict.fromkeys(
        ("model", "revision", "hf-overrides", "load-format"), "the KV of one model means nothing to another"
    ),
    **dict.fromkeys(("dtype", "kv-cache-dtype", "quantization"), "KV blocks are moved byte by byte"),
    "block-size": "unequal KV blocks give wrong tokens",
    **dict.fromkeys(("enable-lora", *LORA_ARGUMENTS), "both compute with the same adapters"),
}
"""vLLM arguments that must be equal in decode and prefill workers, with the reason."""
_LENGTH_IS_A_LIMIT = {
    "deepseek_v2",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "starcoder2",
}
"""Model types whose KV does not depend on max-model-len in vLLM 0.32, except with longrope. Llama 4 is not
among them: it scales its attention by max-model-len."""


def length_changes_kv(folder: Path | None, args: Mapping[str, object]) -> bool:
    """Whether a prompt's KV may depend on max-model-len. `folder` has the model's config.json; None: unknown."""
    try:
        text = (folder / "config.json").read_text() if folder else "{}"
        kind = json.loads(text).get("model_type")
    except (OSError, ValueError, AttributeError):
        return True
    return str(kind) not in _LENGTH_IS_A_LIMIT or "longrope" in text + str(args.get("hf-overrides", ""))


def compare_workers(decode: Arguments, prefill: Arguments, findings: Findings) -> None:
    for name, why in _MUST_BE_EQUAL.items():
        ours, theirs = effective(decode, name), effective(prefill, name)
        if ours != theirs:
            if entry := prefill.get(name):
                said = f"is {shown(theirs)}, but {shown(ours)} in VllmWorker"
            else:
                entry, said = decode[name], f"is {shown(ours)}, but {shown(theirs)} in PrefillWorker"
            text = f"{said}; {why}: set it once in Common and list it in the common-configs of both."
            findings.problem(entry, text)
    ours, theirs = (draft_model(values_of(args)) for args in (decode, prefill))
    if ours != theirs:
        entry = next(
            args[name] for args in (prefill, decode) for name in SPECULATION_ARGUMENTS if name in args
        )
        text = (
            f"makes the draft model {ours or 'none'} in VllmWorker but {theirs or 'none'} in PrefillWorker. KV blocks "
            "hold its KV too: set it once in Common and list it in the common-configs of both."
        )
        findings.problem(entry, text)


def follow_decode(decode: Arguments, prefill: Arguments, findings: Findings) -> None:
    """Give prefill workers, which may stand in, the decode workers' arguments that change responses."""
    for name in sorted(RESPONSE_ARGUMENTS & (decode.keys() | prefill.keys())):
        if name not in prefill:
            prefill[name] = decode[name]
        elif (theirs := effective(decode, name)) != prefill[name].value:
            text = f"but {shown(theirs)} in VllmWorker: set the same value in both, or stand-in: false."
            findings.problem(prefill[name], f"is {shown(prefill[name].value)}, {text}")


def without_stand_in(
    decode: Arguments, prefill: SectionRead[PrefillSection], findings: Findings
) -> SectionRead[PrefillSection]:
    """Turn stand-in off if PrefillWorker sets another max-model-len than VllmWorker. If the file sets `stand-in: true`,
    report a problem too."""
    entry, longest = prefill.args.get("max-model-len"), decode.get("max-model-len")
    if entry is None or not prefill.values.stand_in or (longest and longest.value == entry.value):
        return prefill
    text = "differs from VllmWorker's: longer prompts are prefilled locally, and PrefillWorker is no stand-in"
    if "stand-in" in prefill.own:
        findings.problem(entry, f"{text}: set stand-in: false, or the same length in both.")
    findings.note(entry, f" {text}.")
    return replace(prefill, values=replace(prefill.values, stand_in=False))


def values_of(args: Arguments) -> dict[str, object]:
    return {name: entry.value for name, entry in args.items()}


def effective(args: Arguments, name: str) -> object:
    if name in args:
        return args[name].value
    return None if name == "model" else arguments()[name].default


def shown(value: object) -> str:
    return "vLLM's default" if value is None else str(value)
