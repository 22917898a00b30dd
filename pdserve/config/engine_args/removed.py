"""Arguments that vLLM had once: since which version it has them no more, and what to write instead.

The versions are in the JSON file beside this module, which `python -m tools.vllm_arguments` writes.
"""

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
    """what to do to keep its effect, as a clause; empty: nothing is lost with the line"""

    @property
    def reason(self) -> str:
        """The end of a sentence that begins with the argument."""
        return f"was removed by vLLM in {self.since}{f': {self.instead}' if self.instead else ''}."

    @property
    def problem(self) -> str:
        return self.reason if self.instead else f"was removed by vLLM in {self.since}: remove it."


_SPECULATION = 'set speculative-config, as in {"method": "ngram", "num_speculative_tokens": 4}'
_EPLB = "set eplb-config"
_GRAMMAR = "set structured-outputs-config"
_ROPE = 'set hf-overrides, as in {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}'
_INSTEAD = {
    "cuda-graph-sizes": "set cudagraph-capture-sizes",
    "disable-mm-preprocessor-cache": "set mm-processor-cache-gb: 0",
    "eplb-log-balancedness": _EPLB,
    "eplb-step-interval": _EPLB,
    "eplb-window-size": _EPLB,
    "guided-decoding-backend": _GRAMMAR,
    "guided-decoding-disable-additional-properties": _GRAMMAR,
    "guided-decoding-disable-any-whitespace": _GRAMMAR,
    "guided-decoding-disable-fallback": _GRAMMAR,
    "ngram-prompt-lookup-max": _SPECULATION,
    "ngram-prompt-lookup-min": _SPECULATION,
    "num-redundant-experts": _EPLB,
    "num-speculative-tokens": _SPECULATION,
    "override-attention-dtype": "set attention-config",
    "override-pooler-config": "set pooler-config",
    "prompt-adapters": "vLLM has no prompt adapters any more; use LoRA adapters (lora-modules)",
    "quantization-param-path": "set kv-cache-dtype: fp8 and a checkpoint that has the scales",
    "rope-scaling": _ROPE,
    "rope-theta": _ROPE,
    "speculative-disable-by-batch-size": _SPECULATION,
    "speculative-draft-tensor-parallel-size": _SPECULATION,
    "speculative-max-model-len": _SPECULATION,
    "speculative-model": _SPECULATION,
    "speculative-model-quantization": _SPECULATION,
}


def is_vllm_config(names: Iterable[object]) -> bool:
    """Whether these are the keys of a file of `vllm serve --config`: vLLM's arguments, not sections of a graph."""
    written = [str(name).replace("_", "-") for name in names]
    known = [name for name in written if canonical(name) or removed(name) or name == "model-tag"]
    return len(known) > len(written) / 2


@cache
def _versions() -> Mapping[str, str]:
    return msgspec.json.decode(PATH.read_bytes(), type=dict[str, str])


def removed(name: str) -> Removed | None:
    """None if vLLM has the argument, or never had it. `name` is in kebab-case."""
    since = _versions().get(name)
    return Removed(since, _INSTEAD.get(name, "")) if since else None
