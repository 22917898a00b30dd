"""Which answers are said again."""

import pytest

from pdserve.messages import KvHandle, PrefillDone
from pdserve.prefill.held import Held


def done(name: str, lease: float = 30.0) -> PrefillDone:
    return PrefillDone(
        name, KvHandle("prefill-0", f"engine-{name}", "127.0.0.1", 1, [[1]], 16, 16, lease=lease)
    )


def test_what_was_just_said_is_not_said_again() -> None:
    held = Held()
    held.add("decode-0", done("a"))
    assert list(held.untaken()) == []


async def test_what_is_kept_is_said_again_until_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.prefill.held.TELL_AGAIN", 0.0)
    held = Held()
    held.add("decode-0", done("a"))
    held.add("decode-1", done("b"))
    assert list(held.untaken()) == [("decode-0", done("a")), ("decode-1", done("b"))]
    held.release("engine-a")
    held.release("unknown")
    assert list(held.untaken()) == [("decode-1", done("b"))]
    held.release("engine-b")
    assert list(held.untaken()) == []
    await held.empty()


async def test_what_the_engine_never_released_is_forgotten() -> None:
    held = Held()
    held.add("decode-0", done("a", lease=0.0))
    assert list(held.untaken()) == []
    await held.empty()
