"""Loader and plan report problems for any file, never a traceback."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.config.load import load
from pdserve.plan.plan import make_plan
from pdserve.plan.render import plan_as_dict, render
from pdserve.util.errors import ConfigError
from tests.config.test_load import DYNAMO, GRAPH
from tests.plan.models import machine

TEXT = DYNAMO.replace("/mnt/DeepSeek-R1-Distill-Qwen-14B", "demo") + GRAPH
LINES = [line for line in TEXT.splitlines() if line.partition("#")[0].strip()]
VALUES = ["", "null", "[]", "{}", "-1", "'x'", "[[1], {a: b}]", "{x: {y: z}}", "1e400", ".nan", "2024-01-01"]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_file_raises_only_config_errors(tmp_path: Path, data: st.DataObject) -> None:
    lines = list(LINES)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        match data.draw(st.sampled_from(["value", "value", "value", "drop", "double"])):
            case "value":
                lines[at] = f"{lines[at].split(':')[0]}: {data.draw(st.sampled_from(VALUES))}"
            case "drop":
                del lines[at]
            case "double":
                lines.insert(at, lines[at])
    path = tmp_path / "graph.yaml"
    path.write_text("\n".join(lines))
    try:
        found = load(path, {})
    except ConfigError as error:
        problems = error.problems
    else:
        for on in (machine(), machine(*[("A10", 24)] * 4)):
            plan = make_plan(found, on, env={})
            assert plan_as_dict(plan)["fits"] is not bool(plan.problems)
            render(plan)
        return
    assert problems
    assert all(str(path) in problem for problem in problems)


@pytest.mark.parametrize(
    "text", ["&a [*a]", "? [1]\n: 2", "\t", "%YAML 9", "---\n...\n", "a: !!set {b}", "\ufeffFrontend: {}"]
)
def test_odd_yaml_is_a_config_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load(path, {})
