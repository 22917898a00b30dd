"""On the CPU, a step without decoding uses idle cores beside the threads that the plan gives it."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve.engine.vllm import idle_cores
from pdserve.engine.vllm.idle_cores import MIN_TOKENS, VARIABLE, running_threads, use_idle_cores

PROMPT = {"a": MIN_TOKENS}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv(VARIABLE, "4")
    yield
    torch.set_num_threads(usual)


def threads_of(
    tokens: dict[str, int], *running: int, drafts: dict[str, list[int]] | None = None, fails: bool = False
) -> int:
    """Return the number of threads of a step with these tokens, of which `drafts` are draft tokens. `running`: counts
    of running threads, one for each check; the last repeats."""
    seen, looks = list[int](), list(running)

    class Runner:
        def execute_model(self, step: Any) -> None:
            seen.append(torch.get_num_threads())
            if fails:
                raise RuntimeError

    use_idle_cores(Runner, lambda: looks.pop(0) if len(looks) > 1 else looks[0])
    try:
        step = SimpleNamespace(num_scheduled_tokens=tokens, scheduled_spec_decode_tokens=drafts or {})
        Runner().execute_model(step)
    except RuntimeError:
        assert fails
    assert torch.get_num_threads() == 1, "later steps have the plan's threads"
    return seen[0]


def test_prompts_get_the_idle_cores() -> None:
    assert threads_of(PROMPT, 1) == 4
    assert threads_of(PROMPT, 3) == 2
    assert threads_of(PROMPT, 1, fails=True) == 4


def test_a_prompt_gets_no_core_of_another_engine() -> None:
    assert threads_of(PROMPT, 4) == 1
    assert threads_of(PROMPT, 40) == 1


def test_processes_that_stop_soon_do_not_count() -> None:
    assert threads_of(PROMPT, 3, 4, 1) == 4


def test_decoding_and_short_prompts_use_the_threads_of_the_plan() -> None:
    assert threads_of({"a": MIN_TOKENS, "stream": 1}, 1) == 1
    assert threads_of({"a": MIN_TOKENS, "stream": 4}, 1, drafts={"stream": [7, 8, 9]}) == 1
    assert threads_of({"a": MIN_TOKENS - 1}, 1) == 1
    assert threads_of({}, 1) == 1


def test_threads_that_the_user_chose_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable, the user has chosen the number of threads."""
    monkeypatch.delenv(VARIABLE)
    assert threads_of(PROMPT, 1) == 1


@pytest.mark.parametrize("text", ["0.00 0.00 0.00 0/0 0\n", "0.00\n", None], ids=["gVisor", "cut", "missing"])
def test_no_core_is_idle_if_the_kernel_does_not_say(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error would end the engine at each long prompt."""
    load = tmp_path / "loadavg"
    if text is not None:
        load.write_text(text)
    monkeypatch.setattr(idle_cores, "_LOAD", load)
    assert threads_of(PROMPT, running_threads()) == 1


def test_this_thread_is_counted_as_running() -> None:
    assert running_threads() >= 1
