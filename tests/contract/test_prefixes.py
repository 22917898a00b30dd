"""Names of prompt prefixes are equal only if the prefixes are; reports name each change once."""

import pytest

from pdserve.contract.prefixes import MAX_REPORTED, CachedPrefixes, PromptNames, block_names, root_name


def cached(blocks: int, block_size: int, prompt: list[int], salt: str | None = None) -> CachedPrefixes:
    prefixes = CachedPrefixes()
    prefixes.resize(blocks, block_size)
    prefixes.follow("frontends")
    for depth, name in enumerate(block_names(prompt, block_size, root_name(salt)), 1):
        prefixes.add(name, depth)
    return prefixes


def test_a_name_depends_on_its_block_and_all_before_it() -> None:
    prompt = list(range(40))
    whole = list(block_names(prompt, 8))
    assert len(whole) == len(set(whole)) == 5
    assert list(block_names([*prompt, 7, 7], 8)) == whole
    assert list(block_names(prompt, 8, end=39)) == whole[:4]
    other = list(block_names([*prompt[:16], 99, *prompt[17:]], 8))
    assert other[:2] == whole[:2]
    assert not set(other[2:]) & set(whole)
    assert not set(block_names([99, *prompt[1:]], 8)) & set(whole)
    assert not set(block_names(prompt, 8, root_name("salt"))) & set(whole)
    assert list(block_names(prompt[16:], 8, whole[1])) == whole[2:]


def test_names_are_the_same_in_every_process_and_version() -> None:
    assert [name.hex() for name in block_names([1, 2, 3, 151_642], 2)] == [
        "2be61d6b44e007e6",
        "53476d83208bf5a6",
    ]


@pytest.mark.parametrize(
    ("prompt", "salt", "hit"),
    [
        (list(range(40)), None, 32),  # the last token is computed in any case
        (list(range(41)), None, 40),
        ([*range(16), 99, *range(17, 40)], None, 16),
        (list(range(41)), "salt", 0),
        ([], None, 0),
    ],
)
def test_leading_cached_blocks_are_a_hit(prompt: list[int], salt: str | None, hit: int) -> None:
    assert cached(100, 8, list(range(40))).hit(PromptNames(prompt, salt)) == hit
    assert cached(100, 8, list(range(40)), "other").hit(PromptNames(prompt, salt)) == 0
    if salt:
        assert cached(100, 8, list(range(40)), salt).hit(PromptNames(prompt, salt)) == 40


def test_changes_of_blocks_with_copies_are_reported_once() -> None:
    prefixes = cached(100, 8, list(range(24)))
    first, second, third = block_names(list(range(24)), 8)
    prefixes.add(first, 1)  # a second copy of the block
    assert [sorted(part) for part in prefixes.changes("frontends")] == [sorted([first, second, third]), []]
    assert prefixes.changes("frontends") == ([], [])
    assert not prefixes.remove(first)
    assert prefixes.remove(third)
    prefixes.add(b"newcomer", 1)
    prefixes.remove(b"newcomer")
    added, removed = prefixes.changes("frontends")
    assert (added, set(removed)) == ([], {third, b"newcomer"})
    assert set(prefixes.known()) == {first, second}
    prefixes.clear()
    assert set(prefixes.changes("frontends")[1]) == {first, second}
    assert prefixes.hit(PromptNames(list(range(24)), None)) == 0


@pytest.mark.parametrize(
    ("blocks", "stride"), [(1, 1), (MAX_REPORTED, 1), (MAX_REPORTED + 1, 2), (40_000, 16)]
)
def test_a_large_cache_reports_every_nth_block(blocks: int, stride: int) -> None:
    prefixes = cached(blocks, 1, list(range(64)))
    assert prefixes.stride == stride
    told = list(block_names(list(range(64)), 1))[stride - 1 :: stride]
    assert set(prefixes.known()) == set(told)
    assert prefixes.hit(PromptNames(list(range(64)), None)) == 63


def test_only_the_newest_blocks_of_host_memory_are_reported() -> None:
    """All blocks of the engine's own cache are reported, however many blocks host memory holds."""
    prefixes = CachedPrefixes()
    prefixes.resize(MAX_REPORTED, 1)
    everything = [number.to_bytes(8) for number in range(MAX_REPORTED + 3)]
    for name in everything:
        for host in (False, True):
            prefixes.add(name, 1, host=host)
    for name in everything:
        prefixes.remove(name)
    assert set(prefixes.known()) == set(everything[3:])
    prefixes.add(everything[0], 1)
    assert set(prefixes.known()) == {everything[0], *everything[3:]}
    assert not prefixes.remove(everything[0])
    assert prefixes.remove(everything[9], host=True)
    assert set(prefixes.known()) == {everything[0], *everything[4:]} - {everything[9]}


def test_prompts_with_equal_prefixes_are_compared_by_one_block_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 outputs of one long prompt would otherwise block the event loop for half a second."""
    prompt, compared = list(range(1601)), list[int]()
    at = PromptNames.at

    def counted(self: PromptNames, block_size: int, index: int) -> bytes | None:
        compared.append(index)
        return at(self, block_size, index)

    monkeypatch.setattr(PromptNames, "at", counted)
    alike = [PromptNames(prompt[:tokens], None) for tokens in (320, 160, 800, *[800] * 60)]
    others = [PromptNames([9, *prompt[1:]], None), PromptNames(prompt, "salt")]
    assert PromptNames(prompt, None).shared([*alike, *others], 16) == 50
    assert len(compared) == 50 + len(alike) + len(others)
    assert PromptNames(prompt[:800], None).shared([PromptNames(prompt, None)], 16) == 49, "not its last token"
    assert PromptNames(prompt, None).shared([], 16) == 0
