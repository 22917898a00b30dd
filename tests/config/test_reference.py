"""The page of all keys is what the schema says."""

from tools.configuration import PAGE, page, read_keys


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tools.configuration"


def test_every_key_has_a_type_and_a_meaning() -> None:
    assert [key for key in read_keys() if not key.meaning or not key.kind] == []
