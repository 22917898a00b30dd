"""Arguments that vLLM has removed: in which version, and what to write instead.

The versions are in the JSON file beside this module, which `python -m tools.vllm_arguments` writes.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from pdserve.config.engine_args.arguments import canonical

PATH = Path(__file__).with_name("vllm_removed.json")


class Removed(NamedTuple):
    since: str
    """the first minor version of vLLM without it, as in 0.10"""
    instead: str = ""
    """what to do to keep its effect, as a clause; empty: remove the line"""

    @property
    def reason(self) -> str:
        """The end of a sentence that begins with the argument."""
        return f"was removed by vLLM in {self.since}{f': {self.instead}' if self.instead else ''}."

    @property
    def problem(self) -> str:
        return self.reason if self.instead else f"was removed by vLLM in {self.since}: remove it."


_SPECULATION = 'set speculative-config, as in {"method": "ngram", "num_speculative_tokens": 4}'
_INSTEAD = {
    "cuda-graph-sizes": "set cudagraph-capture-sizes",
    "disable-mm-preprocessor-cache": "set mm-processor-cache-gb: 0",
    "eplb-.*|num-redundant-experts": "set eplb-config",
    "guided-decoding-.*": "set structured-outputs-config",
    "ngram-.*|num-speculative-tokens|speculative-(?!disable-mqa).*": _SPECULATION,
    "override-attention-dtype": "set attention-config",
    "override-pooler-config": "set pooler-config",
    "prompt-adapters": "vLLM has no prompt adapters any more; use LoRA adapters (lora-modules)",
    "quantization-param-path": "set kv-cache-dtype: fp8 and a checkpoint that has the scales",
    "rope-.*": 'set hf-overrides, as in {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}',
}
"""Regex of argument names -> what to do to keep their effect."""


def is_vllm_config(names: Iterable[object]) -> bool:
    """Whether most of these keys are vLLM's arguments, as in a file of `vllm serve --config`."""
    written = [str(name).replace("_", "-") for name in names]
    known = [name for name in written if canonical(name) or removed(name) or name == "model-tag"]
    return len(known) > len(written) / 2


@cache
def _versions() -> Mapping[str, str]:
    return msgspec.json.decode(PATH.read_bytes(), type=dict[str, str])


def removed(name: str) -> Removed | None:
    """Return when vLLM removed the argument (kebab-case), and its replacement; None if vLLM has it, or never had it."""
    if (since := _versions().get(name)) is None:
        return None
    return Removed(since, next((text for names, text in _INSTEAD.items() if re.fullmatch(names, name)), ""))
