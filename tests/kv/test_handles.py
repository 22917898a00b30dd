import time

import msgspec
import pytest

from pdserve.errors import ProtocolError
from pdserve.kv.handles import LEASE_MARGIN, check_handle, expired
from pdserve.messages import KvHandle

GOOD = KvHandle(
    "prefill-0-ab", "r.1", "10.0.0.1", 5600, [[4, 9, 2]], 33, 16, computed_at=time.monotonic() + 1e6
)


def test_a_handle_that_fits_passes() -> None:
    check_handle(GOOD, 33, 16, "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"block_size": 32}, "do not fit"),
        ({"num_tokens": 32}, "32 tokens for a prompt of 33"),
        ({"block_ids": [[4, 9]]}, r"\[2\] KV blocks"),
        ({"block_ids": [[4, 9, 2, 1]]}, r"\[4\] KV blocks"),
        ({"block_ids": []}, r"\[\] KV blocks"),
        ({"block_ids": [[4, 9, 2], []]}, r"\[3, 0\] KV blocks"),
        ({"block_ids": [[4, -9, 2]]}, "negative"),
        ({"block_ids": [[4, 9, 4]]}, "twice"),
        ({"engine_id": ""}, "without engine"),
        ({"request_id": ""}, "without engine"),
        ({"host": ""}, "without engine"),
        ({"computed_at": 0.0}, "lease"),
    ],
)
def test_a_handle_that_does_not_fit_is_refused_with_the_reason(change: dict[str, object], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        check_handle(msgspec.structs.replace(GOOD, **change), 33, 16, "")


def test_a_handle_expires_a_margin_before_its_lease() -> None:
    just_in = msgspec.structs.replace(GOOD, computed_at=time.monotonic() - 30 + LEASE_MARGIN + 1, lease=30.0)
    just_out = msgspec.structs.replace(GOOD, computed_at=time.monotonic() - 30 + LEASE_MARGIN - 1, lease=30.0)
    assert not expired(just_in)
    assert expired(just_out)
