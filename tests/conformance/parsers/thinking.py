"""A model that reasons and calls tools, served by pdserve and by vLLM: the demo model with `<think>` and `</think>` in
its vocabulary, as in Qwen3. Where the demo model would write a comma, this model ends its reasoning:

    Hello! I am the tiny demo model of pdserve. I remember codes: tell me the code of a box or a door</think> then ask
    me for it.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pdserve.demo import MODEL_DIR
from tests.conformance.pair import Pair
from tests.e2e.graph import RealGraph

NOT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}
{%- elif message.content %}{{ message.content | map(attribute='text') | join('') }}{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{% endif %}"""


def make_model(folder: Path) -> Path:
    """`</think>` gets 1.02 times the comma's embedding, so that it wins wherever the comma would. `<think>` gets a zero
    embedding and never wins."""
    shutil.copytree(MODEL_DIR, folder)
    files = {name: json.loads((folder / name).read_text()) for name in ("tokenizer.json", "config.json")}
    tokenizer, config = files["tokenizer.json"], files["config.json"]
    for token in ("<think>", "</think>"):
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": config["vocab_size"], "content": token, **plain})
        config["vocab_size"] += 1
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    weights = load_file(folder / "model.safetensors")
    (name,) = [name for name in weights if "embed_tokens" in name]
    comma = weights[name][tokenizer["model"]["vocab"][","]]
    weights[name] = torch.cat([weights[name], torch.stack([0 * comma, 1.02 * comma])])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@dataclass(frozen=True)
class Thinking:
    graph: RealGraph
    """A decode worker and a prefill worker."""
    pair: Pair
    adapters: dict[str, Path]
    """Folders of LoRA adapters."""
