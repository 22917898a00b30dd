"""`docs/api.md` lists the differences from vLLM that the tests allow, and all fields of a receipt."""

import re

from msgspec.structs import fields

from pdserve.contract.reports import Receipt
from tests.conformance.differences import API_PAGE, DIFFERENCES, WHERE


def test_the_page_has_every_difference_with_a_place() -> None:
    assert WHERE.keys() <= DIFFERENCES.keys()
    assert len(DIFFERENCES) > 30


def test_the_page_has_every_field_of_a_receipt() -> None:
    """The hops are in docs/traces.md, which `tests/observe/test_traces.py` compares with the code."""
    section = API_PAGE.read_text().split("## Where a request went")[1].split("\n## ")[0]
    assert {f.name for f in fields(Receipt)} <= set(re.findall(r"`(\w+)`", section))
