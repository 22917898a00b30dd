"""Streams are compared independently of how tokens are grouped."""

import json

import pytest

from tests.conformance.answers import differences, events_of

FIRST = {"token_ids": [1], "prompt_token_ids": [7, 8]}
NEXT = {"token_ids": [2], "prompt_token_ids": None}
ODD = {"token_ids": [2], "prompt_token_ids": [9]}
LAST = {"token_ids": [3]}
JOINED = {"token_ids": [2, 3]}
ALL = {"token_ids": [1, 2, 3], "prompt_token_ids": [7, 8]}


def stream(*chunks: dict[str, object]) -> object:
    """Return the events of a stream with one output. The last chunk finishes it."""
    ends = [None] * (len(chunks) - 1) + ["length"]
    choices = [{"index": 0, "finish_reason": end, **chunk} for end, chunk in zip(ends, chunks, strict=True)]
    return events_of("\n\n".join(f"data: {json.dumps({'choices': [choice]})}" for choice in choices))


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ((FIRST, NEXT, LAST), (FIRST, NEXT, LAST), True),
        ((FIRST, JOINED), (FIRST, NEXT, LAST), True),
        ((FIRST, NEXT, LAST), (FIRST, JOINED), True),
        ((ALL,), (FIRST, NEXT, LAST), True),
        ((FIRST, ODD, LAST), (FIRST, NEXT, LAST), False),
        ((NEXT, FIRST, LAST), (FIRST, NEXT, LAST), False),
        ((FIRST, NEXT, LAST), (FIRST, NEXT, JOINED), False),
    ],
)
def test_the_grouping_of_tokens_makes_no_difference(
    ours: tuple[dict[str, object], ...], theirs: tuple[dict[str, object], ...], same: bool
) -> None:
    assert (not list(differences(stream(*ours), stream(*theirs)))) is same


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
TEXT = {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}]}
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
WHOLE = (ROLE, TEXT, END, USAGE, "[DONE]")


@pytest.mark.parametrize(
    ("events", "same"),
    [
        (WHOLE, True),
        ((ROLE, TEXT, TEXT, END, USAGE, "[DONE]"), False),  # the text differs
        ((ROLE, ROLE, TEXT, END, USAGE, "[DONE]"), False),
        ((ROLE, TEXT, END, END, USAGE, "[DONE]"), False),
        ((ROLE, TEXT, END, USAGE, USAGE, "[DONE]"), False),
        ((ROLE, TEXT, END, USAGE, "[DONE]", "[DONE]"), False),
        ((ROLE, END, TEXT, USAGE, "[DONE]"), False),
    ],
)
def test_repeated_events_and_text_after_the_finish_are_differences(
    events: tuple[object, ...], same: bool
) -> None:
    ours, theirs = (
        events_of(
            "\n\n".join(f"data: {each if isinstance(each, str) else json.dumps(each)}" for each in sent)
        )
        for sent in (events, WHOLE)
    )
    assert (not list(differences(ours, theirs))) is same
