"""Which of vLLM's routes a separated graph has. Anything else does not reach vLLM's app: most of the rest
steers an engine that is not in this process."""

import re

GENERATE = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
        "/generative_scoring",
    }
)
"""POST, with a JSON body that may name its model"""

_PASSING = frozenset({"/v1/messages/count_tokens", "/tokenize", "/detokenize"})
"""of these, what needs no engine"""

_BY_MODEL = re.compile(r"/v1/responses/[^/]+(/cancel)?|/docs|/docs/oauth2-redirect|/redoc|/openapi\.json")
"""without a body: answered by the model of the query parameter `model`, or by the only one"""

_ELSEWHERE = re.compile(
    r"/sleep|/wake_up|/is_sleeping|/(start|stop)_profile|/reset_.*|/collective_rpc|/server_info|/pause|/resume"
    r"|/is_paused|/scale_elastic_ep|/is_scaling_elastic_ep|/v1/(load|unload)_lora_adapter|/v1/embeddings|/v1/realtime"
    r"|/pooling|/classify|/score|/v1/score|(/v[12])?/rerank|/inference/v1/.*|.*/(de)?render|/v1/audio/.*"
    r"|/kv_event_sources|/v1/systemone|/invocations|/init_weight.*|/update_weights"
)


def is_generate(path: str) -> bool:
    return path in GENERATE


def needs_turn(path: str) -> bool:
    """Whether a decode worker has to work for it."""
    return path in GENERATE - _PASSING


def is_passing(path: str) -> bool:
    """Tokenized or the reverse, and no more."""
    return path in _PASSING


def is_by_model(path: str) -> bool:
    return _BY_MODEL.fullmatch(path) is not None


def is_left_out(path: str) -> bool:
    """vLLM has this route for some models, and it makes no sense here: 404 that says so."""
    return _ELSEWHERE.fullmatch(path) is not None
