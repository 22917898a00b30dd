from pathlib import Path

import pytest

from pdserve.kv import side_channel
from pdserve.kv.side_channel import CurveKey
from pdserve.security.credentials import create


@pytest.fixture(params=["plain", "with credentials"])
def key(request: pytest.FixtureRequest, tmp_path: Path) -> CurveKey | None:
    return CurveKey.of(create(tmp_path / "graph")) if request.param == "with credentials" else None


@pytest.fixture(autouse=True)
def ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel, "_POLL_MS", 50)
