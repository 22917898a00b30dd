from typing import Any

import pytest

from pdserve.decode.peers.prefill_workers import RETRY_AFTER, UntakenPrompts
from pdserve.decode.policy.decision import MIN_TIMEOUT


@pytest.mark.parametrize(
    ("events", "silent"),
    [
        ([], False),
        ([("untaken", 10, 13)], False),
        ([("untaken", 10, 13), ("untaken", 10, 14)], True),
        (
            [("untaken", 10, 13), ("untaken", 10, 10 + MIN_TIMEOUT / 2)],
            False,
        ),  # the request's deadline came first
        ([("untaken", 10, 13), ("heard", 13.5), ("untaken", 14, 17)], False),
        ([("untaken", 10, 13), ("untaken", 10, 14), ("heard", 14.5)], False),
        ([("heard", 12), ("untaken", 10, 13), ("untaken", 10, 14)], False),  # a prompt was taken meanwhile
        ([("heard", 9), ("untaken", 10, 13), ("untaken", 10, 14), ("heard", 9)], True),
    ],
)
def test_workers_are_silent_after_two_untaken_prompts_until_a_message(
    events: list[Any], silent: bool
) -> None:
    """`untaken`: when a prompt was asked for, and when it was given up. `heard`: when a worker sent a message."""
    prompts = UntakenPrompts()
    for event, *times in events:
        getattr(prompts, event)(*times)
    assert prompts.is_silent(15.0) is silent


def test_after_a_retry_one_more_untaken_prompt_is_enough() -> None:
    prompts = UntakenPrompts()
    prompts.untaken(10, 13)
    prompts.untaken(10, 14)
    assert not prompts.is_silent(14 + RETRY_AFTER)
    prompts.untaken(50, 53)
    assert prompts.is_silent(54)
