"""What tests of workers share."""

import pytest


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers whose KV nobody reads are said again soon."""
    monkeypatch.setattr("pdserve.prefill.held.TELL_AGAIN", 0.05)
    monkeypatch.setattr("pdserve.prefill.worker.TELL_INTERVAL", 0.01)
