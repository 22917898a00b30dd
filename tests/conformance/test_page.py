"""The page of differences is the table of the tests, and its table of receipts that of the code."""

import re

from msgspec.structs import fields

from pdserve.watch import Receipt
from tests.conformance.differences import API_PAGE, DIFFERENCES


def test_the_page_has_every_difference_and_no_other() -> None:
    text = API_PAGE.read_text()
    table = text[text.index("| what |") :].partition("\n\n")[0].splitlines()[2:]
    assert table == [difference.row for difference in DIFFERENCES.values()]


def test_the_page_has_every_field_of_a_receipt() -> None:
    """Its hops are in docs/traces.md, which `tests/test_traces.py` holds against the code."""
    section = API_PAGE.read_text().split("## Where a request went")[1].split("\n## ")[0]
    assert {f.name for f in fields(Receipt)} <= set(re.findall(r"`(\w+)`", section))
