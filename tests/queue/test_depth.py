import pytest

from pdserve.contract.messages import QueueState
from pdserve.queue.depth import QueueDepth


def published(*sequences: int) -> QueueDepth:
    depth = QueueDepth()
    for sequence in sequences:
        depth = depth.published(sequence)
    return depth


@pytest.mark.parametrize(
    ("depth", "value"),
    [
        (QueueDepth(), 0),
        (published(3, 1, 2), 3),  # confirmations out of order
        (published(1, 2, 3).reported(QueueState(1, 2)), 2),
        (published(1).reported(QueueState(5, 7)), 7),  # others publish too
        (published(1, 2).reported(QueueState(1, 0)), 1),  # the second was stored after the pull
        (
            published(1, 2, 3).reported(QueueState(3, 0)).reported(QueueState(1, 2)),
            0,
        ),  # a redelivery, or a late report
        (published(1, 2, 3).reported(QueueState(3, 0)).published(4), 1),
        (
            published(1, 2, 3).reported(QueueState(2, 1)).reported(QueueState(2, 4)),
            4,
        ),  # redelivered, with newer pending
        (published(9), 1),  # if requests of others waited, a report would have said so
        (
            published(1).reported(QueueState(1, 2)).published(6),
            5,
        ),  # requests of others waited, so those stored before 6 count as waiting
        (published(4, 9).reported(QueueState(5, 1)), 2),
    ],
)
def test_depth_without_asking_the_server(depth: QueueDepth, value: int) -> None:
    assert depth.value == value


@pytest.mark.parametrize(
    ("before", "stored", "state", "value"),
    [
        (QueueDepth(), 7, QueueState(4, 3), 3),  # a new consumer on a stream with a past
        (published(1, 2, 3), 3, QueueState(0, 1), 1),  # two have expired or were purged
        (QueueDepth(4, 5, 9), 9, QueueState(4, 5), 5),
        (QueueDepth(40, 9, 49), 2, QueueState(1, 1), 1),  # NATS lost its data: a new stream
    ],
)
def test_depth_synced_with_the_server(before: QueueDepth, stored: int, state: QueueState, value: int) -> None:
    assert before.synced(stored, state, before).value == value


def test_missing_requests_stay_missing_until_later_ones_are_delivered() -> None:
    depth = published(1, 2, 3).synced(3, QueueState(0, 0), published(1, 2, 3))
    assert depth.published(4).value == 1
    assert depth.published(4).reported(QueueState(4, 0)).value == 0
    assert depth.published(4).reported(QueueState(4, 0)).published(5).value == 1


def test_a_request_published_during_a_sync_is_not_missing() -> None:
    asked = published(1, 2)
    assert asked.published(3).synced(2, QueueState(0, 2), asked).value == 3


def test_a_pull_reported_during_a_sync_is_newer() -> None:
    asked = published(1, 2, 3)
    assert asked.reported(QueueState(3, 0)).synced(3, QueueState(0, 3), asked).value == 0
