from typing import Any

import pytest

from pdserve.config.schema import DecodeSection
from pdserve.decode.estimate import Estimates
from pdserve.decode.policy import (
    FIRST_GUESS,
    FLOOR,
    SLACK,
    Decision,
    PrefillTimeout,
    decide,
)

ON = DecodeSection(remote_prefill=True, max_local_prefill_length=100, max_prefill_queue_size=4)
ALWAYS = DecodeSection(
    remote_prefill=True, conditional_disagg=False, max_local_prefill_length=100, max_prefill_queue_size=4
)
OFF = DecodeSection(remote_prefill=False)


@pytest.mark.parametrize(
    ("prompt", "hit", "depth", "workers", "connected", "settings", "mode", "reason"),
    [
        (1, 0, 0, 1, True, ON, "local", "short"),
        (100, 0, 0, 1, True, ON, "local", "short"),
        (101, 0, 0, 1, True, ON, "remote", "long"),
        (101, 1, 0, 1, True, ON, "local", "short"),
        (5000, 4900, 0, 1, True, ON, "local", "short"),
        (5000, 4899, 0, 1, True, ON, "remote", "long"),
        (101, 0, 3, 1, True, ON, "remote", "long"),
        (101, 0, 4, 1, True, ON, "local", "queue-full"),
        (100, 0, 4, 1, True, ON, "local", "short"),
        (101, 0, 0, 0, True, ON, "local", "no-prefill-worker"),
        (101, 0, 0, 1, False, ON, "local", "queue-down"),
        (101, 0, 0, 0, False, ON, "local", "queue-down"),
        (1, 0, 0, 1, True, ALWAYS, "remote", "always"),
        (5000, 4999, 99, 1, True, ALWAYS, "remote", "always"),
        (1, 0, 0, 0, True, ALWAYS, "local", "no-prefill-worker"),
        (5000, 0, 0, 1, True, OFF, "local", "disabled"),
    ],
)
def test_decisions(
    prompt: int,
    hit: int,
    depth: int,
    workers: int,
    connected: bool,
    settings: DecodeSection,
    mode: str,
    reason: str,
) -> None:
    decision = decide(prompt, hit, depth, workers, connected, settings)
    assert (decision.mode, decision.reason) == (mode, reason)


ADAPTIVE = DecodeSection(remote_prefill=True, policy="adaptive")


def costs(wait_here: float, streams: int, wait_there: float, handover: float = 0.02) -> Estimates:
    """Of a prompt that takes 50 ms wherever it is computed."""
    return Estimates(wait_here, 0.05, streams, wait_there, 0.05, handover, 0.05)


@pytest.mark.parametrize(
    ("estimates", "mode", "reason"),
    [
        (costs(0.0, 0, 0.0), "local", "idle"),
        (costs(0.0, 0, 0.5), "local", "idle"),
        (costs(0.05, 0, 0.0), "remote", "remote-cheaper"),
        (costs(0.05, 0, 0.05), "local", "local-cheaper"),
        (costs(0.0, 1, 0.04), "local", "local-cheaper"),
        (costs(0.0, 1, 0.02), "remote", "remote-cheaper"),
        (costs(0.0, 8, 0.3), "remote", "remote-cheaper"),
        (costs(0.0, 8, 0.4), "local", "local-cheaper"),
        (costs(0.0, 32, 1.5), "remote", "remote-cheaper"),
        (costs(0.0, 32, 1.6), "local", "local-cheaper"),
        (costs(0.05, 32, 0.15), "remote", "remote-cheaper"),
        (costs(0.0, 8, 0.0, handover=1.0), "local", "local-cheaper"),
    ],
)
def test_the_cheaper_way(estimates: Estimates, mode: str, reason: str) -> None:
    decision = decide(5000, 0, 99, 1, True, ADAPTIVE, estimates=estimates)
    assert (decision.mode, decision.reason) == (mode, reason)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ({"supported": False}, "unsupported"),
        ({"migrated": True}, "migrated"),
        ({"fits": False}, "too-large"),
        ({"queue_connected": False}, "queue-down"),
        ({"prefill_workers": 0}, "no-prefill-worker"),
        ({"settings": DecodeSection(policy="adaptive")}, "disabled"),
    ],
)
@pytest.mark.parametrize("settings", [ADAPTIVE, ON, ALWAYS])
def test_a_prompt_that_cannot_go_elsewhere_is_local_whatever_it_costs(
    refused: dict[str, Any], reason: str, settings: DecodeSection
) -> None:
    known: dict[str, Any] = {
        "queue_depth": 0,
        "prefill_workers": 1,
        "queue_connected": True,
        "settings": settings,
    }
    decision = decide(5000, 0, **(known | refused), estimates=costs(9.0, 99, 0.0))
    assert decision == Decision("local", reason)


def test_without_conditional_disagg_costs_do_not_matter() -> None:
    settings = DecodeSection(remote_prefill=True, policy="adaptive", conditional_disagg=False)
    assert decide(5, 0, 0, 1, True, settings, estimates=costs(0.0, 0, 9.0)) == Decision("remote", "always")


def test_a_queue_size_of_zero_means_never() -> None:
    settings = DecodeSection(remote_prefill=True, max_local_prefill_length=0, max_prefill_queue_size=0)
    assert decide(5000, 0, 0, 9, True, settings) == Decision("local", "queue-full")


def test_before_the_first_answer_a_slow_machine_is_assumed() -> None:
    assert PrefillTimeout().seconds(1000, 0, 1) == FLOOR + SLACK * 1000 / FIRST_GUESS


@pytest.mark.parametrize(
    ("tokens", "depth", "workers", "seconds"),
    [
        (0, 0, 1, 0.0),
        (1000, 0, 1, 1.0),
        (5000, 0, 1, 5.0),
        (1000, 3, 1, 4.0),
        (1000, 3, 3, 2.0),
        (1000, 3, 0, 4.0),
    ],
)
def test_the_bound_grows_with_the_prompt_and_the_queue(
    tokens: int, depth: int, workers: int, seconds: float
) -> None:
    timeout = PrefillTimeout()
    timeout.learn(1000, 1.0)
    assert timeout.seconds(tokens, depth, workers) == pytest.approx(FLOOR + SLACK * seconds)


def test_the_bound_follows_the_workers_speed() -> None:
    timeout = PrefillTimeout()
    timeout.learn(1000, 1.0)
    before = timeout.seconds(1000, 0, 1)
    for _ in range(50):
        timeout.learn(1000, 0.1)
    assert timeout.seconds(1000, 0, 1) == pytest.approx(FLOOR + SLACK * 0.1, rel=0.01)
    assert timeout.seconds(1000, 0, 1) < before
    timeout.learn(1000, 0.0)  # a clock without resolution says nothing
    assert timeout.seconds(1000, 0, 1) == pytest.approx(FLOOR + SLACK * 0.1, rel=0.01)
