"""What a benchmark says on stderr."""

import re

import pytest
from pdserve_bench.progress import begin


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (540, "9 min")])
def test_a_phase_has_a_line_with_the_time_that_it_takes(
    seconds: float, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    begin("measure", seconds)
    assert re.fullmatch(rf"\d\d:\d\d:\d\d  measure, some {text}\n", capsys.readouterr().err)
