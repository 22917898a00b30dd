"""Requests that vLLM's app would take and no worker can serve."""

from pdserve.frontend.vllm.api_server import EngineCoreRequest

MAX_PROMPT_LOGPROBS = 500_000
"""of one request; an answer has them all at once, some 50 bytes each"""
WHOLE_VOCABULARY = 100_000
"""logprobs that -1 stands for, about"""


def unsupported(request: EngineCoreRequest, prompt_tokens: int, n: int) -> str | None:
    """Why the request cannot be served; None if it can. `prompt_tokens`: of all of its prompts so far."""
    kinds = {feature.modality for feature in request.mm_features or ()} - {"image"}
    if kinds or request.prompt_embeds is not None:
        return "only text and images are served: audio, video and prompt embeddings are not"
    if request.sampling_params is None:
        return "this model generates text: pooling and embedding requests are not served"
    if request.resumable:
        return "streaming input is not served"
    if (count := request.sampling_params.prompt_logprobs) is not None:
        count = WHOLE_VOCABULARY if count < 0 else count
        if (logprobs := prompt_tokens * (count + 1) * n) > MAX_PROMPT_LOGPROBS:
            text = f"prompt tokens x (logprobs + 1) x n make {logprobs} logprobs of the prompt"
            return f"{text}; one request may have {MAX_PROMPT_LOGPROBS}"
    return None
