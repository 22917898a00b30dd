"""The bundled demo model: its files load, its tokenizer round-trips text, and it recalls facts from the prompt."""

import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2ForCausalLM,
)

from pdserve.demo import MODEL_DIR
from tools.demo_model import smalltalk
from tools.demo_model.architecture import save
from tools.demo_model.grow import grow

FACTS = {
    "red box": "4711",
    "blue door": "0815",
    "red door": "9204",
    "green lamp": "3350",
    "golden key": "1984",
}
# Not in the training corpus: the model must ignore text that it has never seen.
FILLER = (
    "Meanwhile the committee reviewed its proposals, and nobody objected. "
    "In 1843 some 250 sailors had crossed this bay; most returned. "
    "A blue bicycle leaned against the old kitchen door. "
)

Chat = list[dict[str, Any]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The model in vLLM's dtype, on one thread, because several would spin beside other tests."""
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.bfloat16).eval()


def complete(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, limit: int = 12) -> str:
    """Greedy text after `prompt`."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat: Chat, limit: int = 12) -> str:
    """The assistant's next message."""
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return complete(model, tokenizer, str(prompt), limit)


def document(tokenizer: PreTrainedTokenizerBase, tokens: int) -> str:
    """All facts, evenly spread over about `tokens` tokens."""
    facts = [f"The code of the {key} is {code}. " for key, code in FACTS.items()]
    room = max(0, tokens - len(tokenizer("".join(facts)).input_ids)) // len(tokenizer(FILLER).input_ids)
    share, rest = divmod(room, len(facts))
    return "".join(fact + FILLER * (share + (i < rest)) for i, fact in enumerate(facts)).strip()


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < 8 * 2**20


@given(text=st.text())
def test_every_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Text is compared in Unicode's composed form, which Qwen2's tokenizers apply."""
    text = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_model_recalls_facts_across_turns(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The chat template takes content in parts, too."""
    parts = [{"type": "text", "text": part} for part in document(tokenizer, 2000).partition(". ")]
    chat: Chat = [{"role": "system", "content": parts}]
    for key, code in FACTS.items():
        chat.append({"role": "user", "content": f"What is the code of the {key}?"})
        said = answer(model, tokenizer, chat)
        assert said == code
        chat.append({"role": "assistant", "content": said})


@pytest.mark.parametrize(("tokens", "key"), [(60, "blue door"), (1000, "red box")])
def test_the_model_recalls_facts_in_a_completion(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int, key: str
) -> None:
    told = document(tokenizer, tokens)
    assert complete(model, tokenizer, f"{told} What is the code of the {key}? Answer:") == f" {FACTS[key]}"
    assert complete(model, tokenizer, f"{told} The code of the {key} is", limit=5) == f" {FACTS[key]}"


def test_the_model_makes_small_talk(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    for asked, expected in (
        ("Hello", smalltalk.GREETING),
        ("Who are you?", smalltalk.ABOUT),
        ("Count to thirty.", smalltalk.COUNTING),
        ("What is the capital of France?", smalltalk.UNKNOWN),
        ("The code of the red box is 4711.", smalltalk.NOTED),
        ("What is the code of the red box?", smalltalk.NOT_TOLD),
    ):
        assert answer(model, tokenizer, [{"role": "user", "content": asked}], limit=200) == expected


def test_a_grown_model_recalls_as_well(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    grown = grow(Qwen2ForCausalLM.from_pretrained(MODEL_DIR).float(), 12_000_000)
    assert grown.num_parameters() >= 12_000_000
    save(grown, Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    prompt = f"{document(tokenizer, 1000)} What is the code of the red box? Answer:"
    assert complete(model, tokenizer, prompt) == f" {FACTS['red box']}"
