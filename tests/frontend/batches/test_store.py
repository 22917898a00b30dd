import io
from pathlib import Path

import pytest

from pdserve.frontend.batches import store
from pdserve.frontend.batches.store import Batch, Store, StoredFile
from tests.full_disk import small_disk


def test_one_process_has_the_lock(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as second:
        with (tmp_path / "lock").open("w") as first:
            assert (store.lock(first), store.lock(second)) == (True, False)
        assert store.lock(second)


def test_a_full_disk_is_an_error_and_leaves_no_file_by_half(tmp_path: Path) -> None:
    batch = Batch("batch_1", "/v1/completions", "file-1", 0, 0)
    results: list[dict[str, object]] = [{"custom_id": str(number), "a": "b" * 400} for number in range(20)]
    with small_disk(tmp_path / "disk") as disk:
        kept = Store(disk.path, "ann")
        kept.append(batch, "output", results[:1])
        disk.fill()
        with pytest.raises(OSError, match="No space"):
            kept.append(batch, "output", results[1:])
        disk.free()
        done = kept.done(batch, "output")
        kept.append(batch, "output", [result for result in results if result["custom_id"] not in done])
        assert kept.done(batch, "output") == {str(number) for number in range(20)}
        with pytest.raises(OSError, match="No space"):
            kept.keep(StoredFile("file-2", "", 0, 0), io.BytesIO(b"x" * (20 << 20)))
        assert not list(disk.path.rglob("file-2*"))
