"""Which model card is the newest, whatever the workers' clocks say."""

from pdserve.messages import ModelCard
from pdserve.process.presence import generation


def card(fingerprint: str, generation: int = 0, created: int = 0) -> ModelCard:
    return ModelCard("m", "/m", fingerprint=fingerprint, generation=generation, created=created)


def test_the_first() -> None:
    assert generation(card("a"), []) == 1


def test_what_is_there_already_is_no_newer() -> None:
    there = [card("a", 3), card("b", 4)]
    assert generation(card("a", created=99), there) == 3
    assert generation(card("b"), there) == 4


def test_a_change_is_newer_than_all_that_is_there() -> None:
    assert generation(card("c"), [card("a", 3, created=10**12), card("b", 4)]) == 5
    assert generation(card("a"), [card("b", 4)]) == 5, "and so is going back"
