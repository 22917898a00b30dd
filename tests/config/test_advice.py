"""Following a problem's advice word for word solves the problem and adds no other."""

import random
import re
from pathlib import Path

import pytest

from pdserve.config.load import load
from pdserve.plan.plan import make_plan
from pdserve.util.errors import ConfigError
from tests.config.files.test_dynamo import FILE as DYNAMO
from tests.config.files.test_dynamo import SAMPLES
from tests.config.test_load import DYNAMO as REFERENCE
from tests.plan.models import machine

DEMO = (Path(__file__).parents[2] / "configs/local.yaml").read_text()
TEXTS = {
    "dynamo": DYNAMO,
    "reference": REFERENCE.replace("/mnt/DeepSeek-R1-Distill-Qwen-14B", "demo").replace("10240", "4096"),
    "demo": DEMO,
    **({path.stem: path.read_text() for path in SAMPLES.glob("dynamo-*.yaml")} if SAMPLES.is_dir() else {}),
}
MUTATIONS_PER_TEXT = 40
KEY = re.compile(r"^( *)([\w-]+):(.*)$")
FOREIGN_KEYS = (
    "disable-log-requests",
    "enable-log-request",
    "max-num-seq",
    "tensor-parallel",
    "served-model",
    "hostt",
    "cpu",
)


def problems(folder: Path, text: str) -> list[str]:
    """Return the problems of the file, or else of its plan on a host with four GPUs."""
    path = folder / "graph.yaml"
    path.write_text(text)
    try:
        config = load(path, {})
    except ConfigError as error:
        return error.problems
    return list(make_plan(config, machine(*[("A100-80GB", 80)] * 4), env={}).problems)


def mutated(text: str, chance: random.Random) -> str:
    lines = text.splitlines()
    keys = [at for at, line in enumerate(lines) if KEY.match(line) and not line.strip().startswith("#")]
    at = chance.choice(keys)
    match KEY.match(lines[at]), chance.choice(["typo", "double", "drop", "move", "foreign", "value"]):
        case re.Match() as key, "typo":
            name, where = key[2], chance.randrange(len(key[2]))
            lines[at] = f"{key[1]}{name[:where]}{name[where + 1 :] or 'x'}:{key[3]}"
        case re.Match(), "double":
            lines.insert(at, lines[at])
        case re.Match(), "drop":
            del lines[at]
        case re.Match() as key, "move" if key[1]:
            sections = [row for row in keys if not lines[row].startswith(" ")]
            line = lines.pop(at)
            lines.insert(min(chance.choice(sections) + 1, len(lines)), f"  {line.strip()}")
        case re.Match() as key, "foreign" if key[1]:
            lines.insert(at, f"{key[1]}{chance.choice(FOREIGN_KEYS)}: 1")
        case re.Match() as key, _:
            lines[at] = f"{key[1]}{key[2]}: {chance.choice(['true', '7', 'x', '[a]', '0.5'])}"
    return "\n".join(lines) + "\n"


def advised(text: str, problem: str) -> str | None:
    """Return the text after following the problem's advice; None if a script cannot follow it."""
    place = re.search(r"graph\.yaml:(\d+): (\S+) (.*)", problem)
    if place is None:
        return None
    lines, at, advice = text.splitlines(), int(place[1]) - 1, place[3]
    key = KEY.match(lines[at])
    if key is None:
        return None
    if found := re.search(r"did you mean ([\w-]+)\?", advice):
        lines[at] = f"{key[1]}{found[1]}:{key[3]}"
    elif "keep one of the two" in advice:
        del lines[at]
    elif re.search(r"remove (it|the line)\b", advice):
        end = at + 1
        while end < len(lines) and lines[end].startswith(key[1] + " "):
            end += 1
        del lines[at:end]
    elif (found := re.search(r"move it to (\w+)", advice)) and f"{found[1]}:" in lines:
        line = lines.pop(at)
        lines.insert(lines.index(f"{found[1]}:") + 1, f"  {line.strip()}")
    elif found := re.search(r"must be one of: ([\w-]+)|must be (true) or false", advice):
        lines[at] = f"{key[1]}{key[2]}: {found[1] or found[2]}"
    else:
        return None
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", TEXTS)
def test_following_advice_adds_no_problem(tmp_path: Path, name: str) -> None:
    followed = 0
    for seed in range(MUTATIONS_PER_TEXT):
        text = mutated(TEXTS[name], random.Random(f"{name} {seed}"))
        for _ in range(4):
            before = problems(tmp_path, text)
            after = next((new for each in before if (new := advised(text, each)) is not None), None)
            if after is None:
                break
            left = problems(tmp_path, after)
            assert len(left) <= len(before), (before, left)
            assert left != before, before
            text, followed = after, followed + 1
    assert followed > MUTATIONS_PER_TEXT / 20


@pytest.mark.parametrize(
    ("written", "never"),
    [
        ("disable-log-requests", "enable-log-requests"),
        ("router-num-threads", "safetensors-prefetch-num-threads"),
        ("min-num-seqs", "max-num-seqs"),
        ("max-remote-prefill-length", "max-local-prefill-length"),
    ],
)
def test_a_similar_name_of_another_meaning_is_not_offered(tmp_path: Path, written: str, never: str) -> None:
    text = DEMO.replace("  max-num-seqs: 32\n", f"  {written}: 1\n", 1)
    assert f"did you mean {never}?" not in " ".join(problems(tmp_path, text))
