"""The bundled demo model: its files load, its text round-trips, and it recalls what it was told."""

import unicodedata
from pathlib import Path

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
# Nothing that the corpus knows: the model must look past text that it has never seen.
FILLER = (
    "Meanwhile the committee reviewed its proposals, and nobody objected. "
    "In 1843 some 250 sailors had crossed this bay; most returned. "
    "A blue bicycle leaned against the old kitchen door. "
)

Chat = list[dict[str, str]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """In the dtype that vLLM serves. More threads would spin for each other's end beside other tests."""
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


def test_vllm_can_split_it_in_two(model: PreTrainedModel) -> None:
    config = model.config
    assert config.num_key_value_heads % 2 == config.num_attention_heads % 2 == config.vocab_size % 2 == 0
    assert config.hidden_size // config.num_attention_heads == 64  # vLLM's Qwen2 takes no other head size


@given(text=st.text())
def test_every_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Up to Unicode's composed form, which Qwen2's tokenizers apply."""
    text = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_words_and_digits_are_one_token_each(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer("The code of the red box is 4711.").input_ids) == 7 + 1 + 4 + 1


def test_the_chat_template_renders_turns_and_content_parts(tokenizer: PreTrainedTokenizerBase) -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("key", FACTS)
def test_it_recalls_in_chat(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    told = document(tokenizer, 2000)
    chat = [{"role": "user", "content": f"{told} What is the code of the {key}?"}]
    assert answer(model, tokenizer, chat) == FACTS[key]


@pytest.mark.parametrize(("tokens", "key"), [(60, "blue door"), (1000, "red box"), (2000, "green lamp")])
def test_it_recalls_in_a_completion(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int, key: str
) -> None:
    told = document(tokenizer, tokens)
    assert complete(model, tokenizer, f"{told} What is the code of the {key}? Answer:") == f" {FACTS[key]}"
    assert complete(model, tokenizer, f"{told} The code of the {key} is", limit=5) == f" {FACTS[key]}"


def test_it_recalls_across_turns(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "system", "content": document(tokenizer, 300)}]
    for key, code in FACTS.items():
        chat.append({"role": "user", "content": f"What is the code of the {key}?"})
        said = answer(model, tokenizer, chat)
        assert said == code
        chat.append({"role": "assistant", "content": said})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("Hello", smalltalk.GREETING),
        ("Who are you?", smalltalk.ABOUT),
        ("Tell me a story.", smalltalk.STORY),
        ("Count to thirty.", smalltalk.COUNTING),
        ("What is the capital of France?", smalltalk.UNKNOWN),
        ("The code of the red box is 4711.", smalltalk.NOTED),
        ("What is the code of the red box?", smalltalk.NOT_TOLD),
    ],
)
def test_it_has_some_small_talk(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: str, expected: str
) -> None:
    assert answer(model, tokenizer, [{"role": "user", "content": asked}], limit=200) == expected


def test_a_grown_model_recalls_as_well(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    grown = grow(Qwen2ForCausalLM.from_pretrained(MODEL_DIR).float(), 12_000_000)
    assert grown.num_parameters() >= 12_000_000
    save(grown, Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    prompt = f"{document(tokenizer, 1000)} What is the code of the red box? Answer:"
    assert complete(model, tokenizer, prompt) == f" {FACTS['red box']}"
