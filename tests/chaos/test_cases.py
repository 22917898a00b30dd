"""What is asked."""

from itertools import islice
from pathlib import Path

import pytest
from pdserve_bench.chaos.cases import MAX_OUTPUT, computed, endless, shape, simulated
from pdserve_bench.chaos.reference import again

from pdserve.config.load import load

YAML = """
Common: {model: demo}
Frontend: {served_model_name: demo}
VllmWorker: {engine: sim, remote-prefill: true, max-local-prefill-length: 100, common-configs: [model]}
PrefillWorker: {engine: sim, common-configs: [model]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "graph.yaml"
    path.write_text(YAML)
    return path


@pytest.mark.parametrize("max_model_len", [300, 1024, 8192])
def test_prompts_are_short_or_long_and_never_the_same(file: Path, max_model_len: int) -> None:
    cases = list(islice(endless(shape(load(file, {}), max_model_len), 1), 60))
    lengths = {len(case.prompt) for case in cases}
    assert min(lengths) <= 100 < max(lengths)
    assert max(len(case.prompt) + case.max_tokens for case in cases) < max_model_len
    assert len({case.prompt for case in cases}) == len({case.salt for case in cases}) == 60
    assert {case.stream for case in cases} == {True, False}
    assert max(case.max_tokens for case in cases) <= MAX_OUTPUT


def test_only_simulations_are_computed(file: Path) -> None:
    model = simulated(load(file, {}))
    assert model is not None
    case = next(endless(shape(load(file, {}), 1024), 1))
    answer = computed(case, model)
    assert len(answer) == case.max_tokens
    assert answer[5:] == tuple(
        islice(
            (model.next_token([*case.prompt, *answer[:n]]) for n in range(5, case.max_tokens)),
            case.max_tokens,
        )
    )
    file.write_text(YAML.replace("PrefillWorker: {engine: sim", "PrefillWorker: {engine: vllm"))
    assert simulated(load(file, {})) is None


def test_a_pool_comes_again_under_new_salts(file: Path) -> None:
    pool = list(islice(endless(shape(load(file, {}), 1024), 1), 3))
    found = list(islice(again(pool), 9))
    assert [case.prompt for case in found] == [case.prompt for case in pool] * 3
    assert len({case.salt for case in found}) == 9
