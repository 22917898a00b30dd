"""What the user sees when the graph is ready."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pdserve.config.schema import Config
from pdserve.messages import Instance

_DEMO_PROMPT = (
    "The code of the red box is 4711. The code of the blue box is 2093. The code of the green box is 8150. "
    "The code of the black bag is 3364. What is the code of the red box?"
)
"""long enough for configs/local.yaml to prefill it remotely"""
_PROMPT = "Why is the sky blue? Answer in one sentence."


def url_of(config: Config) -> str:
    """Where clients reach the frontends of this machine; empty where it has none."""
    if config.frontend is None:
        return ""
    host = config.frontend.host
    host = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return (
        f"http://[{host}]:{config.frontend.port}" if ":" in host else f"http://{host}:{config.frontend.port}"
    )


def curl(config: Config) -> str:
    """A streaming chat to paste into a shell."""
    from pdserve.demo import MODEL_DIR

    prompt = _DEMO_PROMPT if config.model == str(MODEL_DIR) else _PROMPT
    body = {
        "model": config.served_model_name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
    }
    # Keys on lines of their own, so that it can be read and edited.
    text = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items())
    command = f"curl -Ni {url_of(config)}/v1/chat/completions -H 'Content-Type: application/json' -d "
    return command + shlex.quote(f"{{\n  {text}\n}}")


def banner(config: Config, instances: Sequence[Instance], seconds: float, log_dir: Path) -> RenderableType:
    """At most 100 columns wide."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("model", f"{config.served_model_name}  [dim]({config.model})[/]")
    if config.frontend is not None:
        facts.add_row("URL", f"[bold]{url_of(config)}/v1[/]")
    facts.add_row("logs", str(log_dir))
    facts.add_row("look", f"pdserve status -f {config.path}")
    facts.add_row("stop", "Ctrl-C")
    title = Text(f"Ready after {seconds:.0f} s", "bold green")
    return Group(Panel(facts, title=title, title_align="left", width=100), _workers(instances))


def _workers(instances: Sequence[Instance]) -> Table:
    table = Table("worker", "GPUs", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("KV cache", "blocks", "max concurrency"):
        table.add_column(heading, justify="right")
    for each in instances:
        if each.kv_blocks:
            table.add_row(
                each.id.rpartition("-")[0],
                ",".join(map(str, each.gpus)) or "CPU",
                f"{each.kv_tokens:,} tokens",
                f"{each.kv_blocks:,} x {each.block_size}",
                f"{each.max_concurrency:.1f} requests of {each.max_model_len:,} tokens",
            )
    return table
