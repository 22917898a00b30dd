"""The summary that `pdserve serve` prints when the graph is ready: its URL, its workers' capacity, a command to try."""

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pdserve.config.api_keys import requires_key
from pdserve.config.schema import Config
from pdserve.contract.live_settings import list_changes, merge_files
from pdserve.contract.records import Instance
from pdserve.demo import FILE, MODEL_DIR
from pdserve.observe.graph_state import slot_name
from pdserve.util.program import pdserve_command

_DEMO_PROMPT = (
    "The code of the red box is 4711. The code of the blue box is 2093. The code of the green box is 8150. "
    "The code of the black bag is 3364. What is the code of the red box?"
)
"""Long enough for configs/local.yaml to prefill it remotely."""
_PROMPT = "Why is the sky blue? Answer in one sentence."


def summary(
    config: Config, instances: Sequence[Instance], seconds: float, log_dir: Path, live: Mapping[str, str]
) -> str:
    lines = [f"Ready after {seconds:.0f} s: {config.served_model_name} ({config.model})"]
    lines += [f"  {name:<10} {fact}" for name, fact in _facts(config, instances, log_dir, live)]
    if config.frontend:
        lines += ["Try it:", curl(config)]
    file = "" if config.path == FILE else f" -f {shlex.quote(str(config.path))}"
    return "\n".join([*lines, "Look at it:", pdserve_command(f"status{file}")])


def _facts(
    config: Config, instances: Sequence[Instance], log_dir: Path, live: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    if config.frontend is not None:
        yield "URL", f"{config.url}/v1"
        yield "dashboard", f"{config.url}/dashboard"
    if config.decode and config.decode.engine == "sim":
        yield "engines", "simulated: their tokens have no meaning"
    for worker in instances:
        if worker.kv_blocks:
            where = f"GPU {','.join(map(str, worker.gpus))}" if worker.gpus else "CPU"
            room = f"{worker.max_concurrency:.1f} requests of {worker.max_model_len:,}"
            host = f" and {worker.host_tokens:,} in host memory" if worker.host_tokens else ""
            host += f" and {worker.disk_tokens:,} on disk" if worker.disk_tokens else ""
            yield slot_name(worker.id), f"{where}, {worker.kv_tokens:,} tokens of KV cache{host}: {room}"
    for line in list_changes(merge_files(each.settings for each in instances), live):
        yield "set", f"{line}  (pdserve set --unset {line.partition(' ')[0]})"
    yield "logs", str(log_dir)
    yield "stop", "Ctrl-C"


def curl(config: Config) -> str:
    """A shell command for a streaming chat."""
    prompt = _DEMO_PROMPT if config.model == str(MODEL_DIR) else _PROMPT
    body = {
        "model": config.served_model_name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
    }
    # A line for each key, so that people can edit the command.
    text = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items())
    unverified = "k" * (config.scheme == "https")  # the certificate need not be for this address
    key = '-H "Authorization: Bearer $KEY" ' if requires_key(config.security, os.environ) else ""
    program = f"curl -Ni{unverified} {config.url}/v1/chat/completions {key}"
    return f"{program}-H 'Content-Type: application/json' -d " + shlex.quote(f"{{\n  {text}\n}}")
