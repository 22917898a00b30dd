"""The paths of requests that a model's app answers."""

import os
import re

GENERATING = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/generative_scoring",
    }
)
"""POST, with a JSON body that may name its model; a decode worker has to work for them"""
TOKENIZING = frozenset({"/v1/messages/count_tokens", "/tokenize", "/detokenize"})
"""likewise, but no decode worker works for them"""
_ALLOWED = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").strip().lower() in ("1", "true")
ADAPTERS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}) if _ALLOWED else frozenset()
"""as vLLM has them: not unless the environment says so"""
WITH_BODY = GENERATING | TOKENIZING | ADAPTERS
BY_ID = re.compile(r"/v1/responses/[^/]+(/cancel)?")
"""nothing is stored: each model gives the same answer"""
BY_QUERY = re.compile(rf"{BY_ID.pattern}|/docs|/docs/oauth2-redirect|/redoc|/openapi\.json")
"""without a body: answered by the model of the query parameter `model`, or by the only one"""
