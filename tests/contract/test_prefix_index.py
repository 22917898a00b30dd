from hashlib import blake2b

import pytest

from pdserve.contract import prefixes
from pdserve.contract.messages import (
    PrefillPrefixes,
    PrefixesChanged,
    decode_prefill_prefixes,
    decode_to_frontend,
    encode,
)
from pdserve.contract.prefix_index import PrefixIndex
from pdserve.contract.prefixes import PromptNames, block_names, root_name
from pdserve.util.errors import ProtocolError

PROMPT = list(range(100))


def change(
    stored: list[int], removed: list[int] | None = None, *, size: int = 8, stride: int = 1, **more: bool
) -> PrefixesChanged:
    """`stored` and `removed`: ends of blocks in PROMPT, in tokens."""
    return PrefixesChanged(size, stride, _names(stored, size), _names(removed or [], size), **more)


def _names(ends: list[int], size: int) -> list[bytes]:
    return [list(block_names(PROMPT, size, end=end))[-1] for end in ends]


def index(*changes: tuple[str, PrefixesChanged]) -> PrefixIndex:
    found = PrefixIndex()
    for worker, told in changes:
        found.apply(worker, told)
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], {}),
        ([("a", change([8, 16, 24]))], {"a": 24}),
        (
            [("a", change([8, 16])), ("b", change([8])), ("c", change([8, 16, 24]))],
            {"a": 16, "b": 8, "c": 24},
        ),
        ([("a", change([8, 16])), ("a", change([24], [8]))], {}),  # blocks after a missing one do not count
        ([("a", change([8, 16])), ("a", change([24], [16]))], {"a": 8}),
        ([("a", change([8, 16])), ("a", change([8], whole=True))], {"a": 8}),
        ([("a", change([8, 8])), ("a", change([], [8, 8, 24]))], {}),
        ([("a", change([16, 32], stride=2)), ("b", change([8, 16, 24]))], {"a": 32, "b": 24}),
        ([("a", change([32], size=32)), ("b", change([8]))], {"a": 32, "b": 8}),
        ([("a", change([8], size=8)), ("a", change([32], size=32, whole=True))], {"a": 32}),
    ],
)
def test_leading_blocks_of_each_worker_count_as_cached(
    changes: list[tuple[str, PrefixesChanged]], expected: dict[str, int]
) -> None:
    assert index(*changes).cached(PromptNames(PROMPT, None)) == expected


def test_a_prompt_counts_as_cached_where_it_will_be_computed() -> None:
    found, other = PrefixIndex(), PromptNames([7, *PROMPT], None)
    found.expect("a", PromptNames(PROMPT, None), 8, kv_blocks=14)
    assert found.cached(PromptNames(PROMPT, None)) == {"a": 96}
    found.apply("a", change([8, 16, 24]))
    found.expect("a", other, 8, kv_blocks=14)
    assert found.cached(other) == {"a": 96}
    assert found.cached(PromptNames(PROMPT, None)) == {"a": 40}, "the end of the older prompt is forgotten"
    for number in range(100):
        found.expect("a", PromptNames([number], None), 8, kv_blocks=14)
        found.expect("a", PromptNames([number] * 8, None), 8, kv_blocks=14)
    assert len(found) == 3 + 14
    assert found.cached(PromptNames(PROMPT, None)) == {"a": 24}, (
        "a reported block stays until the worker reports its removal"
    )
    found.apply("a", change([], [24]))
    assert found.cached(PromptNames(PROMPT, None)) == {"a": 16}
    found.forget("a")
    assert (len(found), found._expected) == (0, {})


def test_names_of_a_prompt_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def counted(block: bytes, *, digest_size: int) -> object:
        hashed.append(block)
        return blake2b(block, digest_size=digest_size)

    monkeypatch.setattr(prefixes, "blake2b", counted)
    names = PromptNames(PROMPT, None)
    first = next(names.of(8))
    assert len(hashed) == 1
    assert list(names.of(8)) == list(names.of(8)) == list(names.reusable(8))
    assert (next(names.of(8)), len(hashed)) == (first, 12)
    assert len(list(PromptNames(PROMPT[:96], None).reusable(8))) == 11


def test_other_prompts_and_salts_do_not_match() -> None:
    found = index(("a", change([8, 16, 24])))
    assert found.cached(PromptNames(PROMPT[:24], None)) == {"a": 16}  # the last token is always computed
    assert found.cached(PromptNames(PROMPT[:8], None)) == found.cached(PromptNames([], None)) == {}
    assert found.cached(PromptNames([*PROMPT[:10], 7, *PROMPT[11:]], None)) == {"a": 8}
    assert found.cached(PromptNames(PROMPT, "salt")) == {}
    found.apply("b", PrefixesChanged(8, 1, list(block_names(PROMPT, 8, root_name("salt"))), []))
    assert found.cached(PromptNames(PROMPT, None)) == {"a": 24}
    assert found.cached(PromptNames(PROMPT, "salt")) == {"b": 96}


def test_a_forgotten_worker_has_no_entries() -> None:
    found = index(("a", change([8, 16])), ("b", change([8])), ("c", change([32], size=32)))
    assert len(found) == 4
    found.apply("empty", change([], whole=True))
    found.apply("sized", change([], size=64, whole=True))
    for worker in ("a", "c", "unknown", "a", "empty", "sized"):
        found.forget(worker)
    assert found.cached(PromptNames(PROMPT, None)) == {"b": 8}
    found.forget("b")
    found.apply("empty", change([], whole=True))
    found.apply("new", change([], whole=True))
    found.forget("new")
    found.forget("empty")
    assert len(found) == 0
    assert found._holders == {}


@pytest.mark.parametrize(("size", "stride"), [(0, 1), (-16, 1), (1 << 62, 1), (16, 0)])
def test_a_report_of_impossible_blocks_is_refused(size: int, stride: int) -> None:
    """In the index, such a report would cause an error for each prompt."""
    report = PrefixesChanged(size, stride, [b"12345678"], [], whole=True)
    with pytest.raises(ProtocolError):
        decode_to_frontend(encode(report))
    with pytest.raises(ProtocolError):
        decode_prefill_prefixes(encode(PrefillPrefixes("prefill-0", report)))
