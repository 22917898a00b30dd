"""Terminal tables fit their terminal."""

from io import StringIO

import pytest
from rich.console import Console, RenderableType

from pdserve.cli.find import GraphAddress
from pdserve.cli.operate import trace
from pdserve.cli.operate.status import render
from pdserve.config.load import load
from pdserve.plan.machine import Machine, what_if
from pdserve.plan.plan import make_plan
from pdserve.plan.render import render as render_plan
from tests.observe.graph_states import FELL, SLOW, loaded
from tests.test_house import ROOT

GRAPH = GraphAddress("127.0.0.1:2379", "pdserve", "http://127.0.0.1:8000")


def _plan() -> RenderableType:
    machine = what_if("2xA10", Machine.detect({}))
    return render_plan(make_plan(load(ROOT / "configs/disagg.yaml", {}), machine))


SHOWN = {
    "status": lambda: render(loaded(down=True, slow=True), GRAPH),
    "trace": lambda: trace.receipt_table([SLOW, FELL]),
    "a receipt": lambda: trace.receipt_page(SLOW),
    "plan": _plan,
}


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("what", SHOWN)
def test_tables_fit_and_split_no_word(what: str, width: int) -> None:
    def lines(width: int) -> list[str]:
        shown = StringIO()
        Console(width=width, file=shown).print(SHOWN[what]())
        return shown.getvalue().splitlines()

    narrow = lines(width)
    assert max(map(len, narrow)) <= width
    text = "".join(narrow).replace(" ", "")
    assert [
        word for line in lines(400) for word in line.split() if "─" not in word and word not in text
    ] == []
