"""Which frontend a decode worker asks for places: pure."""

import pytest

from pdserve.contract.messages import Submit
from pdserve.decode.replies import make_way
from pdserve.decode.requests import DecodeRequest, Phase


def running(text: str) -> list[DecodeRequest]:
    """Each word: a frontend (a digit), a client (a letter), and how often. In order of arrival; `?`: without a first
    step yet."""
    requests: list[DecodeRequest] = []
    for word in text.split():
        frontend, client, count = word[0], word[1], int(word[2:].rstrip("?"))
        for _ in range(count):
            submit = Submit(f"r{len(requests)}", [1], 10.0, [], client=client)
            request = DecodeRequest(frontend, submit, Phase.RUNNING, has_first_step=not word.endswith("?"))
            request.since = len(requests)
            requests.append(request)
    return requests


@pytest.mark.parametrize(
    ("inside", "queued", "expected"),
    [
        ("0g8", 0, ("", 0)),
        ("0g7 1h1?", 0, ("", 0)),  # it is being prefilled
        ("0g8 1h1?", 1, ("0", 1)),
        ("0g2 1g6 0h1?", 1, ("1", 1)),
        ("0g8 0g3? 1h1?", 4, ("0", 4)),  # three wait before it
        ("0g8 1h1? 0g3?", 4, ("0", 1)),
        ("0g6 1h2 1h3?", 3, ("0", 3)),
        ("0g5 1h2 1h3?", 3, ("", 0)),
        ("0a1 0b1 0c1 1d1?", 1, ("", 0)),
        ("0g8 1~1 1h7 0h1?", 1, ("1", 1)),  # what is spare pauses first, also the only one of its client
        ("0~8 1~1?", 1, ("", 0)),
        ("0~1 0a4 0b4 1a1? 1b1? 1a1?", 3, ("0", 1)),  # no more than are spare
        ("0a8 1~3? 1h1?", 4, ("1", 3)),  # what is spare and waits leaves the line
        ("0~5 0~3? 1h1?", 4, ("0", 4)),
    ],
)
def test_make_way(inside: str, queued: int, expected: tuple[str, int]) -> None:
    assert make_way(running(inside), queued) == expected
