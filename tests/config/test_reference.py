"""The page of all keys is what the loader and its schema say."""

from pdserve.config.keys import HOMES
from tools.configuration import PAGE, page, read_keys


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tools.configuration"


def test_every_key_has_a_meaning() -> None:
    assert [key for key in read_keys() if not key.meaning or not key.kind] == []


def test_every_key_is_known_where_it_may_stand() -> None:
    """To the message that says where a key belongs."""
    homes = {
        (section, name) for name, text in HOMES.items() for section in text.replace(" or ", ", ").split(", ")
    }
    assert {(key.section, key.name.split(".")[0]) for key in read_keys()} == homes
