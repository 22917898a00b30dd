import itertools

from hypothesis import given
from hypothesis import strategies as st

from pdserve.queue.jetstream.stream import QueueNames, token

TEXT = st.text(st.sampled_from("aZ09_-./=+ 2Fé*>"), max_size=8)


@given(TEXT, TEXT, TEXT, TEXT)
def test_different_models_never_share_a_name(a: str, b: str, c: str, d: str) -> None:
    names, others = QueueNames(a, b), QueueNames(c, d)
    assert (names == others) == (names.stream == others.stream) == (names.requests == others.requests)


@given(st.text(min_size=0, max_size=150))
def test_tokens_are_legal(text: str) -> None:
    assert token(text)
    assert not set(token(text)) & set(" .*>/\\\t\r\n")
    assert len(token(text)) <= 120


def test_long_names_stay_apart() -> None:
    names = ["x" * 300, "x" * 301, "/" * 100, "/" * 101]
    assert all(token(a) != token(b) for a, b in itertools.combinations(names, 2))
