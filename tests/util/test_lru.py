from pdserve.util.lru import LruDict


def test_the_oldest_keys_are_dropped_first() -> None:
    recent: LruDict[int] = LruDict(3)
    for number, key in enumerate("abcad"):
        recent[key] = number
    assert dict(recent) == {"c": 2, "a": 3, "d": 4}
    assert "b" not in recent
    recent.update(dict.fromkeys("xyzw", 0))
    assert list(recent) == ["y", "z", "w"]
