"""The page of differences is the table of the tests, and its tables of receipts are those of the code."""

import re

from msgspec.structs import fields

from pdserve.watch import HOPS, Receipt
from tests.conformance.differences import API_PAGE, DIFFERENCES


def test_the_page_has_every_difference_and_no_other() -> None:
    text = API_PAGE.read_text()
    table = text[text.index("| what |") :].partition("\n\n")[0].splitlines()[2:]
    assert table == [difference.row for difference in DIFFERENCES.values()]


def test_the_page_has_every_field_of_a_receipt_and_every_hop() -> None:
    section = API_PAGE.read_text().split("## Where a request went")[1].split("\n## ")[0]
    of_fields, of_hops, _ = section.split("| hop |")[0], *section.split("| hop |")[1].split("\n\n", 1)
    assert {f.name for f in fields(Receipt)} <= set(re.findall(r"`(\w+)`", of_fields))
    assert of_hops.splitlines()[2:] == [f"| `{name}` | {what} |" for name, what in HOPS.items()]
