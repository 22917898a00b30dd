"""`docs/configuration.md` is up to date with the schema of the configuration."""

import re

from tools.configuration import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tools.configuration"


def test_every_key_has_a_type_and_a_meaning() -> None:
    keys = re.findall(r"^\| `[^|]+ \| ([^|]*) \| [^|]* \| (.*) \|$", page(), re.M)
    assert len(keys) > 40
    assert [key for key in keys if not all(key)] == []
