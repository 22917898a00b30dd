import pytest

from pdserve.contract.messages import PrefixesChanged
from pdserve.contract.prefix_index import PrefixIndex
from pdserve.contract.prefixes import block_names, root_name

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
def test_how_much_of_a_prompt_workers_have_cached(
    changes: list[tuple[str, PrefixesChanged]], expected: dict[str, int]
) -> None:
    assert index(*changes).cached(PROMPT, None) == expected


def test_the_last_token_is_never_cached_and_other_prompts_and_salts_do_not_match() -> None:
    found = index(("a", change([8, 16, 24])))
    assert found.cached(PROMPT[:24], None) == {"a": 16}
    assert found.cached(PROMPT[:8], None) == found.cached([], None) == {}
    assert found.cached([*PROMPT[:10], 7, *PROMPT[11:]], None) == {"a": 8}
    assert found.cached(PROMPT, "salt") == {}
    found.apply("b", PrefixesChanged(8, 1, list(block_names(PROMPT, 8, root_name("salt"))), []))
    assert found.cached(PROMPT, None) == {"a": 24}
    assert found.cached(PROMPT, "salt") == {"b": 96}


def test_a_forgotten_worker_has_no_entries() -> None:
    found = index(("a", change([8, 16])), ("b", change([8])), ("c", change([32], size=32)))
    assert len(found) == 4
    found.apply("empty", change([], whole=True))
    found.apply("sized", change([], size=64, whole=True))
    for worker in ("a", "c", "unknown", "a", "empty", "sized"):
        found.forget(worker)
    assert found.cached(PROMPT, None) == {"b": 8}
    found.forget("b")
    found.apply("empty", change([], whole=True))
    found.apply("new", change([], whole=True))
    found.forget("new")
    found.forget("empty")
    assert len(found) == 0
    assert found._holders == {}
