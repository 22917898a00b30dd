"""What tests of workers share."""

import pytest


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers whose KV is not read are said again soon."""
    monkeypatch.setattr("pdserve.prefill.answers.REPEAT_AFTER", 0.05)
    monkeypatch.setattr("pdserve.prefill.answers.LOOK_INTERVAL", 0.01)
