"""Paths that vLLM's app of a model answers."""

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
"""POST requests with a JSON body that may name a model; they need a decode worker."""
TOKENIZING = frozenset({"/v1/messages/count_tokens", "/tokenize", "/detokenize"})
"""POST requests with a JSON body that may name a model; they need no decode worker."""
_ALLOWED = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").strip().lower() in ("1", "true")
ADAPTERS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}) if _ALLOWED else frozenset()
"""Routes that load and unload LoRA adapters; none unless vLLM's environment variable allows them."""
WITH_BODY = GENERATING | TOKENIZING | ADAPTERS
BY_ID = re.compile(r"/v1/responses/[^/]+(/cancel)?")
"""Requests for a stored response. Every model answers them with an error, because no model stores responses."""
BY_QUERY = re.compile(rf"{BY_ID.pattern}|/docs|/docs/oauth2-redirect|/redoc|/openapi\.json")
"""Requests without a body. The query parameter `model` chooses the model; a single model needs none."""
