"""Measures how often the demo model recalls a code, per prompt length: `python -m tools.demo_model.evaluate`."""

import argparse
import logging
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen2ForCausalLM

from pdserve.demo import MODEL_DIR
from tools.demo_model import corpus, phrases
from tools.demo_model.tokenizer import END_OF_TEXT, IM_END, IM_START

logger = logging.getLogger(__name__)
LENGTHS = {50: 200, 200: 200, 500: 200, 1000: 200, 2000: 100, 2500: 100, 3000: 100, 4000: 50, 6000: 25}
"""Tokens of a prompt -> number of prompts."""


def probe(rng: random.Random, encode: corpus.Encode, tokens: int, chat: bool) -> tuple[list[int], list[int]]:
    """Return a prompt of about `tokens` tokens that ends with a question about one of its facts, and the answer."""
    story = corpus.Story(rng, corpus.Mix(tokens, talk=0.0, filler=(0.3, 0.98)), encode)
    while not story.told:  # some contexts hold no fact at all
        story.segments, story.length = [], 0
        story.tell_context(max(1, tokens - 30))
    key, code = rng.choice(list(story.told.items()))
    context = [token for segment in story.segments for token in segment.ids]
    question = phrases.QUESTIONS[0].format(key=key)
    if not chat:
        return context + encode(f" {question} Answer:"), encode(f" {code}{END_OF_TEXT}")
    turn = f"{question}{IM_END}\n{IM_START}assistant\n"
    if rng.random() < 0.5:
        prompt = encode(f"{IM_START}system\n") + context + encode(f"{IM_END}\n{IM_START}user\n{turn}")
    else:
        prompt = encode(f"{IM_START}user\n") + context + encode(f" {turn}")
    return prompt, encode(f"{code}{IM_END}")


def is_recalled(model: Qwen2ForCausalLM, prompt: list[int], answer: list[int]) -> bool:
    """Whether greedy decoding gives exactly this answer. One forward pass checks all of its tokens."""
    ids = torch.tensor([prompt + answer])
    with torch.inference_mode():
        logits = model(input_ids=ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
    return bool(logits.argmax(-1).tolist() == answer)


def recall(model: Qwen2ForCausalLM, encode: corpus.Encode, tokens: int, count: int, chat: bool) -> float:
    """Return the share of `count` prompts of one length that the model answers exactly."""
    rng = random.Random(tokens + chat)
    return sum(is_recalled(model, *probe(rng, encode, tokens, chat)) for _ in range(count)) / count


def report(folder: Path, share: float = 1.0) -> list[str]:
    """Return the recall of a saved model, in its saved dtype, as a Markdown table."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = Qwen2ForCausalLM.from_pretrained(folder).eval()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    rows = ["| prompt tokens | prompts | chat | completion |", "|---|---|---|---|"]
    for tokens, full in LENGTHS.items():
        count = max(1, int(full * share))
        chat, raw = (recall(model, encode, tokens, count, chat=form) for form in (True, False))
        rows.append(f"| {tokens} | 2 x {count} | {chat:.1%} | {raw:.1%} |")
        logger.info("%s", rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--share", type=float, default=1.0, help="share of the prompts to try")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    report(options.model, options.share)


if __name__ == "__main__":
    main()
