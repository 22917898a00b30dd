"""vLLM arguments that a user may not set because the graph sets them, and why: a refusal is better than a
change that nobody sees."""

from pdserve.config.arguments import arguments
from pdserve.messages import Role

_SERVER = "is about vLLM's own HTTP server, which a worker does not have; remove it."
_REASONS = {
    "config": "would read a second file of arguments; write them here instead.",
    "host": "belongs in Frontend (where clients connect) or in Graph (where the other workers connect).",
    "port": "belongs in Frontend; workers choose their own ports.",
    "api-server-count": "is Frontend.ServiceArgs.workers in pdserve; remove it.",
    "served-model-name": "belongs in Frontend, because every worker of a graph serves the same name.",
    "kv-events-config": "is set by pdserve, which finds prefix hits by it; remove it.",
    "kv-offloading-size": "would replace the KV connector that joins prefill and decode; remove it.",
    "kv-offloading-backend": "would replace the KV connector that joins prefill and decode; remove it.",
    "ec-transfer-config": "is a split that this graph does not have; remove it.",
    "disable-log-stats": "would blind what routing and `pdserve status` read; remove it.",
    "device-ids": "is decided by the placement; use ServiceArgs.resources.gpu or .gpu-ids.",
    "nnodes": "is not how a worker spans hosts here; use distributed-executor-backend: ray.",
    "node-rank": "is not how a worker spans hosts here; use distributed-executor-backend: ray.",
    "master-addr": "is not how a worker spans hosts here; use distributed-executor-backend: ray.",
    "master-port": "is not how a worker spans hosts here; use distributed-executor-backend: ray.",
    "worker-extension-cls": "is pdserve's own, which asks for AMX in each worker before its first pass; remove it.",
    "runner": "is always generate in this graph; remove it.",
    "convert": "would make an embedding model, which has nothing to decode; remove it.",
    "skip-tokenizer-init": "would leave the frontends without a tokenizer; remove it.",
    "enable-elastic-ep": "changes the ranks while running, which KV transfer cannot follow; remove it.",
}


def set_by_graph(role: Role, split: bool) -> dict[str, str]:
    """What `engine/vllm.py` sets beside the model and its name, in words, for the plan. `split`: KV moves
    between workers."""
    found = {"kv-events-config": "own socket, for prefix hits"} if role is Role.DECODE else {}
    if split:
        kv_role = "kv_producer" if role is Role.PREFILL else "kv_consumer"
        found["kv-transfer-config"] = f"NIXL, {kv_role}, recompute"
    return found


def reason(name: str) -> str | None:
    """Why the argument cannot be set in a worker, as the end of a sentence that begins with its key; None
    where it can. `kv-transfer-config` is read by `workers.py`."""
    if name in _REASONS:
        return _REASONS[name]
    if name.startswith("data-parallel-"):
        return "is ServiceArgs.workers in pdserve: each worker is an engine of its own; remove it."
    return _SERVER if arguments()[name].group == "server" else None
