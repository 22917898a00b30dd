"""From a model card to the command line of vLLM's API server, as the frontend runs it: without an engine."""

import re

from pdserve.config.arguments import to_argv
from pdserve.messages import ModelCard

# What only an engine reads, or what the edge does instead; everything else (tokenizer, templates, parsers,
# limits, defaults of sampling) is passed on. Most engine arguments would do no harm here, but these start
# things or check for hardware.
_NOT_HERE = re.compile(
    r"kv-.*|ec-.*|.*-parallel.*|data-parallel-.*|pipeline-.*|tensor-.*|gpu-.*|num-gpu-.*|cpu-.*|swap-.*|enforce-eager"
    r"|block-size|max-num-.*|.*prefix-caching.*|.*chunked-prefill|scheduling-policy|async-scheduling|stream-interval"
    r"|load-format|download-dir|quantization|speculative-config|compilation-config|additional-config|attention-.*"
    r"|distributed-executor-backend|ray-.*|worker-.*|offload-.*|.*lora.*|enable-sleep-mode|enable-prompt-embeds"
    r"|api-key|host|port|uds|ssl-.*|middleware|allowed-origins|root-path|enable-request-id-headers|disable-log-stats"
    r"|profiler-config|otlp-.*|enable-scale-out|tokens-only|headless|api-server-count|config|model|served-model-name"
    r"|max-model-len|enable-log-requests|uvicorn-log-level|disable-.*access-log.*|performance-mode|optimization-level"
)


def frontend_argv(card: ModelCard, model: str) -> list[str]:
    """`model` is where this host has the model: a folder, or a hub id."""
    kept = {name: value for name, value in card.engine_args.items() if not _NOT_HERE.fullmatch(name)}
    ours: dict[str, object] = {
        "model": model,
        "served-model-name": [card.name],
        "max-model-len": card.max_model_len,
        "allowed-origins": [],
    }
    # a long text that is tokenized leaves a thread for the prompts of others
    return to_argv({"renderer-num-workers": 2, **kept, **ours})
