"""Checks a KV handle before an engine reads what it names. vLLM does not check it, and would die or generate wrong
tokens."""

from pdserve.contract.messages import KvHandle
from pdserve.util.errors import ProtocolError


def prefix_hit(handle: KvHandle) -> int:
    """Prompt tokens whose KV the prefill engine had in its prefix cache."""
    hit = handle.extra.get("remote_prefill_cached_tokens")
    return hit if isinstance(hit, int) else 0


def check_handle(handle: KvHandle, prompt_tokens: int, block_size: int, fingerprint: str) -> None:
    """Raises ProtocolError with the reason. Assumes one KV cache group, because hybrid models are not supported."""
    if handle.block_size != block_size:
        raise ProtocolError(f"KV blocks of {handle.block_size} tokens do not fit blocks of {block_size}")
    if handle.fingerprint != fingerprint:
        theirs, ours = handle.fingerprint or "an unknown model", fingerprint or "an unknown model"
        raise ProtocolError(f"KV of other weights or settings: {theirs}, not {ours}")
    if not handle.engine_id or not handle.request_id or not handle.host:
        raise ProtocolError("a KV handle without engine, request or host")
    if handle.num_tokens != prompt_tokens:
        raise ProtocolError(f"KV of {handle.num_tokens} tokens for a prompt of {prompt_tokens}")
    needed = -(-prompt_tokens // block_size)
    if not handle.block_ids or any(len(group) != needed for group in handle.block_ids):
        sizes = [len(group) for group in handle.block_ids]
        raise ProtocolError(f"{sizes} KV blocks for a prompt that fills {needed}")
    if any(block < 0 for group in handle.block_ids for block in group):
        raise ProtocolError("a negative KV block id")
    if any(len(set(group)) != len(group) for group in handle.block_ids):
        raise ProtocolError("a KV block id that occurs twice")


def source(handle: KvHandle) -> tuple[str, str]:
    """Identify the prefill by the ids of its engine and of its request in that engine."""
    return handle.engine_id, handle.request_id
