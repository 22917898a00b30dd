import msgspec
import pytest

from pdserve.contract.messages import KvHandle
from pdserve.kv.handles import check_handle
from pdserve.util.errors import ProtocolError

GOOD = KvHandle("prefill-0-ab", "r.1", "10.0.0.1", 5600, [[4, 9, 2]], 33, 16)


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
    ],
)
def test_a_handle_that_does_not_fit_is_refused_with_the_reason(change: dict[str, object], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        check_handle(msgspec.structs.replace(GOOD, **change), 33, 16, "")
