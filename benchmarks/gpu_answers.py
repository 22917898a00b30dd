"""Ask twenty prompts greedily, one after the other: `gpu_answers.py URL FILE [EXPECTED]` writes the output tokens to
FILE, and prints where the tokens differ from EXPECTED."""

import itertools
import json
import random
import sys
import urllib.request
from pathlib import Path

WORDS = [f"word{number}" for number in range(50)]


def ask(url: str, prompt: str) -> list[int]:
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 32, "ignore_eos": True}
    data = json.dumps({**body, "return_token_ids": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return found


def main(url: str, file: str, expected: str = "") -> int:
    chance = random.Random(7)
    prompts = [" ".join(chance.choices(WORDS, k=60 + 40 * number)) for number in range(20)]
    answers = [ask(url, prompt) for prompt in prompts]
    Path(file).write_text(json.dumps(answers))
    if not expected:
        return 0
    same = 0
    for number, (got, want) in enumerate(zip(answers, json.loads(Path(expected).read_text()), strict=True)):
        same += got == want
        if got != want:
            first = next(n for n, pair in enumerate(itertools.zip_longest(got, want)) if len(set(pair)) > 1)
            print(f"different: prompt {number} from token {first} on: {got[first:]}, expected {want[first:]}")
    print(f"same: {same} of {len(answers)} answers, token for token")
    return int(same < len(answers))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
