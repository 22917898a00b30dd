"""The paths of requests that a model's app answers."""

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
WITH_BODY = GENERATING | TOKENIZING
BY_ID = re.compile(r"/v1/responses/[^/]+(/cancel)?")
"""nothing is stored: each model gives the same answer"""
BY_QUERY = re.compile(rf"{BY_ID.pattern}|/docs|/docs/oauth2-redirect|/redoc|/openapi\.json")
"""without a body: answered by the model of the query parameter `model`, or by the only one"""
