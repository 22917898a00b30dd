"""The demo model's byte-level BPE tokenizer and its ChatML template."""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tools.demo_model import smalltalk, words

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
VOCAB_SIZE = 1024
MAX_POSITIONS = 8192

# As in Qwen2, because transformers ignores tokenizer.json for `qwen2` models. Each digit is a token of its own, and a
# word includes its leading space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.content is string %}{%- set content = message.content %}"
    "{%- else %}{%- set content = message.content | map(attribute='text') | join('') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def build_tokenizer(sentences: Iterator[str]) -> Tokenizer:
    """Train BPE so that words of the corpus are one token each. Other words are several tokens or bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return tokenizer


def tokenizer_lines() -> Iterator[str]:
    """Yield training text: the demo model's vocabulary with leading spaces, fixed answers, and typical sentences."""
    named = words.COLOURS + words.OBJECTS + words.NUMBER_WORDS
    for weight, group in ((30, named), (10, words.COMMON + words.PEOPLE)):
        for word in group:
            yield from [" " + word] * weight
    yield from ["system\n", "user\n", "assistant\n"] * 10
    for asked, answer in smalltalk.SMALL_TALK:
        yield from asked
        yield from [answer] * 6
    yield from [smalltalk.UNKNOWN, smalltalk.NOTED, smalltalk.NOT_TOLD] * 6
    yield from ["The code of the red box is 4711.", "What is the code of the red box? Answer: 4711"] * 10
    yield from ["Question: What was the code for it? Answer:", "Tell me the code. Remember the code."] * 10


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json with the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
