import pytest

from pdserve.prefill.pull_policy import POLL_INTERVAL, TICK, pause


@pytest.mark.parametrize(
    ("streams", "prompt_seconds", "waiting", "seconds"),
    [
        (0, 0.1, 0, 0.0),  # idle: at once
        (0, 100.0, 5, 0.0),
        (1, 0.1, 0, POLL_INTERVAL),  # no prompt is known to wait: the worker polls
        (32, 0.0, 0, POLL_INTERVAL),
        (2, 0.2, 1, 0.05),  # a quarter of its slots: a quarter of a prompt's time
        (4, 0.08, 3, 0.04),
        (8, 0.08, 1, 0.08),  # full
        (8, 0.0, 1, TICK),  # no prompt was measured yet
        (8, 100.0, 1, POLL_INTERVAL),  # bounded, so that nothing starves
    ],
)
def test_how_long_a_worker_leaves_the_queue_to_others(
    streams: int, prompt_seconds: float, waiting: int, seconds: float
) -> None:
    assert pause(streams, 8, prompt_seconds, waiting) == pytest.approx(seconds)
