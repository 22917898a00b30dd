"""What the user sees until the graph is ready, derived from the log lines of its processes, and when it is ready."""

import asyncio
import json
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pdserve.config.api_keys import configured
from pdserve.config.schema import Config
from pdserve.observe.tables import table
from pdserve.ports import in_url
from pdserve.records import Instance
from pdserve.settings import changed, of_files
from pdserve.supervisor.output import ProcessOutput
from pdserve.supervisor.restarts import ProcessState

REMIND = 15.0
"""seconds without news after which a plain log says what is still loading"""

_PHASES = (
    (re.compile(r"Resolved architecture|Using max model len"), "starting the engine"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the engine's workers"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"Loading weights took|Model loading took"), "allocating KV cache"),
    (re.compile(r"KV cache size"), "warming up"),
    (re.compile(r"init engine .* took"), "registering"),
)
"""vLLM's log lines in a start, and what it does next"""

_DEMO_PROMPT = (
    "The code of the red box is 4711. The code of the blue box is 2093. The code of the green box is 8150. "
    "The code of the black bag is 3364. What is the code of the red box?"
)
"""long enough for configs/local.yaml to prefill it remotely"""
_PROMPT = "Why is the sky blue? Answer in one sentence."


def phase_of(message: str) -> str | None:
    """The phase that begins with this log line, if any."""
    return next((phase for pattern, phase in _PHASES if pattern.search(message)), None)


@dataclass
class _Start:
    phase: str = "importing"
    since: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    """its duration, once ready"""

    def __str__(self) -> str:
        if self.seconds is not None:
            return f"ready after {self.seconds:.0f} s"
        return f"{self.phase} … {time.monotonic() - self.since:.0f} s"


class StartProgress:
    """A line per process while they start: live on a terminal, else a log line for each change."""

    def __init__(self, output: ProcessOutput, names: list[str]) -> None:
        self._output = output
        self._starts = {name: _Start("waiting to start") for name in names}
        self._missing = ""
        self._began = self._told = time.monotonic()
        self._is_live = output.console.is_terminal
        self._live = Live(
            get_renderable=self._render, console=output.console, refresh_per_second=4, transient=True
        )

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._output.quietly(self._live.stop)

    def line(self, name: str, message: str) -> None:
        start, phase = self._starts[name], phase_of(message)
        if phase and start.seconds is None and phase != start.phase:
            start.phase = phase
            self._tell(f"{name}: {start}")

    def changed(self, name: str, state: ProcessState) -> None:
        match state:
            case ProcessState.STARTING:
                self._starts[name] = _Start()
            case ProcessState.READY:
                self._starts[name].seconds = time.monotonic() - self._starts[name].since
            case ProcessState.WAITING | ProcessState.STOPPED:
                self._starts[name].phase = str(state)
        self._tell(f"{name}: {self._starts[name]}")

    def waiting_for(self, missing: str) -> None:
        """All processes are registered, and the frontends still lack this."""
        if missing != self._missing:
            self._missing = missing
            self._tell(f"waiting for {missing}")

    async def remind(self) -> None:
        """Without a live display, log now and then what is still loading; never returns."""
        while True:
            await asyncio.sleep(1)
            loading = [
                f"{name} {start.phase}" for name, start in self._starts.items() if start.seconds is None
            ]
            if loading and time.monotonic() - self._told > REMIND:
                self._tell(f"{self.elapsed:.0f} s so far: {', '.join(loading)}")

    def _tell(self, news: str) -> None:
        self._told = time.monotonic()
        if not self._is_live:
            self._output.say(news)

    def _render(self) -> Text:
        lines = [f"  {name:<12} {start}" for name, start in self._starts.items()]
        if self._missing:
            lines.append(f"  waiting for {self._missing}")
        return Text("\n".join([f"Starting, {self.elapsed:.0f} s so far (Ctrl-C stops)", *lines]), "dim")


def banner(
    config: Config, instances: Sequence[Instance], seconds: float, log_dir: Path, live: Mapping[str, str]
) -> RenderableType:
    """The table of what is ready and how to use it, at most 100 columns wide. `live`: the live settings."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("model", f"{config.served_model_name}  [dim]({config.model})[/]")
    if config.frontend is not None:
        facts.add_row("URL", f"[bold]{url_of(config)}/v1[/]")
        facts.add_row("page", f"{url_of(config)}/dashboard")
    for line in changed(of_files(each.settings for each in instances), live):
        facts.add_row("set", f"{line}  [dim](pdserve set --unset {line.partition(' ')[0]})[/]")
    facts.add_row("logs", str(log_dir))
    facts.add_row("stop", "Ctrl-C")
    numbers = ("KV cache", "blocks", "max concurrency")
    workers = table("worker", "GPUs", *numbers, numbers=numbers)
    for worker in instances:
        if worker.kv_blocks:
            workers.add_row(
                worker.id.rpartition("-")[0],
                ",".join(map(str, worker.gpus)) or "CPU",
                f"{worker.kv_tokens:,} tokens",
                f"{worker.kv_blocks:,} x {worker.block_size}",
                f"{worker.max_concurrency:.1f} requests of {worker.max_model_len:,} tokens",
            )
    title = Text(f"Ready after {seconds:.0f} s", "bold green")
    return Group(Panel(facts, title=title, title_align="left", width=100), workers)


def url_of(config: Config) -> str:
    """The URL of the frontends of this machine; empty where it has none."""
    if config.frontend is None:
        return ""
    return f"{config.scheme}://{in_url(config.frontend.host, '127.0.0.1')}:{config.frontend.port}"


def curl(config: Config) -> str:
    """A shell command for a streaming chat."""
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
    unverified = "k" * (config.scheme == "https")  # the certificate need not be for this address
    key = '-H "Authorization: Bearer $KEY" ' if configured(config.security, os.environ) else ""
    command = f"curl -Ni{unverified} {url_of(config)}/v1/chat/completions {key}"
    return f"{command}-H 'Content-Type: application/json' -d " + shlex.quote(f"{{\n  {text}\n}}")
