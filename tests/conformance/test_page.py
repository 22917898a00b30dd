"""The page of differences is the table of the tests."""

from tests.conformance.differences import API_PAGE, DIFFERENCES


def test_the_page_has_every_difference_and_no_other() -> None:
    text = API_PAGE.read_text()
    table = text[text.index("| what |") :].partition("\n\n")[0].splitlines()[2:]
    assert table == [difference.row for difference in DIFFERENCES.values()]
