"""On a CPU, computes prompts with the idle cores, too, while the engine decodes no sequence.

The plan divides the cores among the engines of a graph (`plan/slots.py`), because engines that each use all cores slow
each other down. While there is only one request, only one engine has work, and the cores of the others would stay idle.
"""

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

VARIABLE = "PDSERVE_MAX_THREADS"
"""Environment variable, set by the plan: maximum of threads for a step."""
MIN_TOKENS = 128
"""Prompt tokens of a step for which more threads are started; a shorter step does not gain from them."""
LOOKS = 4
LOOK_INTERVAL = 50e-6
"""Seconds between two looks at the running threads. An engine that computes runs at each look. A process that
only passed a request on stops running after some 100 us."""
_LOAD = Path("/proc/loadavg")


def running_threads() -> int:
    """Return how many threads of this machine run or could run, including this one. If the kernel does not say (gVisor
    says 0), return a huge number, so that no core counts as idle."""
    with suppress(OSError, LookupError, ValueError):
        # 0.52 0.58 0.59 2/1205 4711
        return int(_LOAD.read_text().split()[3].partition("/")[0]) or sys.maxsize
    return sys.maxsize


def use_idle_cores(runner: Any, running: Callable[[], int] = running_threads) -> None:
    """Have `runner`, vLLM's class of model runners, use the idle cores, too, for steps of prompts only."""
    maximum, usual = int(os.environ.get(VARIABLE, "0")), torch.get_num_threads()
    if maximum <= usual:
        return
    execute = runner.execute_model

    def execute_model(self: Any, step: Any, *args: Any, **named: Any) -> Any:
        threads = maximum + 1 - fewest(running) if has_only_prompts(step) else 0
        with _threads(threads, usual) if threads > usual else nullcontext():
            return execute(self, step, *args, **named)

    runner.execute_model = execute_model


def fewest(running: Callable[[], int]) -> int:
    """Return the fewest running threads of several looks; the first look is enough if only this thread runs."""
    found = running()
    for _ in range(LOOKS - 1):
        if found <= 1:
            break
        time.sleep(LOOK_INTERVAL)
        found = min(found, running())
    return found


def has_only_prompts(step: Any) -> bool:
    """Whether a step (vLLM's `SchedulerOutput`) has enough tokens, all of prompts. A decoding sequence has one token,
    or draft tokens."""
    tokens: Collection[int] = step.num_scheduled_tokens.values()
    return sum(tokens) >= MIN_TOKENS and min(tokens) > 1 and not step.scheduled_spec_decode_tokens


@contextmanager
def _threads(count: int, usual: int) -> Iterator[None]:
    torch._C.set_num_threads(count)  # vLLM replaces `torch.set_num_threads` by a warning
    try:
        yield
    finally:
        torch._C.set_num_threads(usual)
