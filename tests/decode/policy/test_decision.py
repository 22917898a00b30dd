from functools import partial
from typing import Any

import pytest

from pdserve.config.schema import DecodeSection
from pdserve.decode.policy.cost import Estimates
from pdserve.decode.policy.decision import (
    FIRST_GUESS,
    MIN_TIMEOUT,
    TIMEOUT_FACTOR,
    Decision,
    PrefillTimeout,
    decide,
)

ON = DecodeSection(remote_prefill=True, max_local_prefill_length=100, max_prefill_queue_size=4)
NEVER = DecodeSection(remote_prefill=True, max_local_prefill_length=0, max_prefill_queue_size=0)
ALWAYS = DecodeSection(remote_prefill=True, conditional_disagg=False, policy="adaptive")
ADAPTIVE = DecodeSection(remote_prefill=True, policy="adaptive")


def costs(local_wait: float, streams: int, remote_wait: float, handover: float = 0.02) -> Estimates:
    """Costs of a prompt that takes 50 ms on any worker."""
    return Estimates(local_wait, 0.05, streams, remote_wait, 0.05, handover, 0.05)


@pytest.mark.parametrize(
    ("prompt", "hit", "depth", "settings", "mode", "reason"),
    [
        (100, 0, 0, ON, "local", "short"),
        (101, 1, 0, ON, "local", "short"),
        (101, 0, 3, ON, "remote", "long"),
        (101, 0, 4, ON, "local", "queue-full"),
        (100, 0, 4, ON, "local", "short"),
        (5000, 0, 0, NEVER, "local", "queue-full"),
        (5000, 4999, 99, ALWAYS, "remote", "always"),
    ],
)
def test_thresholds_and_always_ignore_costs(
    prompt: int, hit: int, depth: int, settings: DecodeSection, mode: str, reason: str
) -> None:
    for estimates in (None, costs(0.0, 0, 9.0), costs(9.0, 9, 0.0)):
        decision = decide(prompt, hit, depth, 1, True, settings, estimates=estimates)
        assert (decision.mode, decision.reason) == (mode, reason)


@pytest.mark.parametrize(
    ("estimates", "mode", "reason"),
    [
        (costs(0.0, 0, 0.0), "local", "idle"),
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
def test_the_cheaper_way_is_chosen(estimates: Estimates, mode: str, reason: str) -> None:
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
def test_a_prompt_that_cannot_be_remote_is_local_at_any_cost(
    refused: dict[str, Any], reason: str, settings: DecodeSection
) -> None:
    asked = partial(
        decide, 5000, 0, queue_depth=0, prefill_workers=1, queue_connected=True, settings=settings
    )
    assert asked(**refused, estimates=costs(9.0, 99, 0.0)) == Decision("local", reason)


@pytest.mark.parametrize(
    ("tokens", "depth", "workers", "seconds"),
    [
        (5000, 0, 1, 5.0),
        (1000, 3, 1, 4.0),
        (1000, 3, 3, 2.0),
        (1000, 3, 0, 4.0),
    ],
)
def test_the_timeout_grows_with_the_prompt_and_the_queue(
    tokens: int, depth: int, workers: int, seconds: float
) -> None:
    timeout = PrefillTimeout()
    timeout.learn(1000, 1.0)
    assert timeout.seconds(tokens, depth, workers) == pytest.approx(MIN_TIMEOUT + TIMEOUT_FACTOR * seconds)


def test_the_timeout_follows_the_workers_speed() -> None:
    timeout = PrefillTimeout()
    assert timeout.seconds(1000, 0, 1) == MIN_TIMEOUT + TIMEOUT_FACTOR * 1000 / FIRST_GUESS, (
        "a slow machine is assumed"
    )
    timeout.learn(1000, 1.0)
    for _ in range(50):
        timeout.learn(1000, 0.1)
    timeout.learn(1000, 0.0)  # a coarse clock may show 0: ignored
    assert timeout.seconds(1000, 0, 1) == pytest.approx(MIN_TIMEOUT + TIMEOUT_FACTOR * 0.1, rel=0.01)
