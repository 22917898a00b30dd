from pathlib import Path

from pdserve.frontend.batches import store


def test_one_process_has_the_lock(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as second:
        with (tmp_path / "lock").open("w") as first:
            assert (store.lock(first), store.lock(second)) == (True, False)
        assert store.lock(second)
