"""Reads a model's sizes from config.json and safetensors headers, without loading weights or importing torch."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.util.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_ALIASES = {"half": "float16", "float": "float32"}
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of safetensors dtypes that vLLM converts when it loads them."""
_WEIGHTS = {".safetensors", ".bin", ".pt", ".gguf", ".tensors"}
_PART = re.compile(r"-\d+-of-(\d+)$")
_MAX_HEADER = 100 * 2**20
_TOWERS = {"text_config", "vision_config", "audio_config"}
_ATTENTION = {"attention", "chunked_attention", "full_attention", "sliding_attention"}
_STATE_KEY = re.compile("mamba_|ssm_|linear_(attn|conv|key|num)|conv_L_cache$|hybrid_override_pattern$")
"""Matches config keys of models whose layers (some or all) have a state of fixed size instead of KV."""
_STATE_KIND = re.compile("mamba|linear|conv|recurrent|ssm|delta|rwkv|lightning", re.IGNORECASE)
"""Matches names of such layers."""
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_ALTERNATING = {"gemma2", "gemma3_text", "gpt_oss"}
"""Architectures that mix layers with and without a sliding window, which older configs do not say."""
_UNWRITTEN: dict[object, dict[str, int]] = {
    "gemma3_text": {
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
    }
}
"""Values that configs of an architecture may leave out, as transformers fills them in."""
_TIED = {"gemma", "gemma2", "gemma3_text"}
"""Architectures whose output layer is the embedding if the config does not set tie_word_embeddings."""


@dataclass(frozen=True)
class ModelFacts:
    folder: Path
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    max_len: int | None
    """None if the config has none, or scales its positions"""
    dtype: str
    stored: Mapping[str, int]
    """bytes of weights by safetensors dtype; `?`: only the files' sizes are known; empty: nothing is known"""
    odd_layers: tuple[str, ...] = ()
    """kinds of layers whose KV has an unusual size, or that have no KV"""
    window: int = 0
    """tokens of the layers' sliding window; 0: none, or none that is shorter than the longest prompt"""
    only_windows: bool = False
    experts: int = 0
    """of each mixture-of-experts layer"""
    expert_intermediate: int = 0
    """intermediate size of an expert"""
    latent: int = 0
    """width of a compressed KV entry (multi-head latent attention), which replaces all heads"""
    positions: int = 0
    """rows of the rotary table: the config's max_position_embeddings"""
    tied: bool = False
    """the embedding is also the output layer"""
    multimodal: bool = False
    """takes more than text"""

    def resolve_dtype(self, asked: object) -> str:
        """Return the dtype in which vLLM computes: `auto` is the model's own, but bfloat16 instead of float32."""
        dtype = _ALIASES.get(str(asked), str(asked))
        if dtype != "auto":
            return dtype
        return self.dtype if self.dtype in ("float16", "bfloat16") else "bfloat16"

    @property
    def stateful_layers(self) -> tuple[str, ...]:
        """Kinds of layers with a state of fixed size instead of KV."""
        return tuple(kind for kind in self.odd_layers if _STATE_KIND.search(kind))

    @property
    def quantized(self) -> bool:
        return bool(self.stored.keys() - _FLOATS.keys() - {"?"})

    def weights(self, dtype: str) -> int:
        """Return the bytes of all weights after loading; quantized weights stay as they are stored."""
        target = DTYPE_BYTES.get(dtype, 2)
        return sum(size * target // _FLOATS.get(kind, target) for kind, size in self.stored.items())


def read_model(folder: Path) -> ModelFacts:
    """Read a model's sizes. Raises ConfigError if something is missing or unknown."""
    path = folder / "config.json"
    try:
        whole = json.loads(path.read_text("utf-8"))
        config = {**whole, **whole.get("text_config", {})}
        config = _UNWRITTEN.get(config.get("model_type"), {}) | config
        return _facts(folder, config, multimodal=bool(_TOWERS & whole.keys()))
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"{path} cannot be read ({reason}): give a folder with a whole Hugging Face model."
        raise ConfigError([text]) from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        text = f"{folder} is not a model that pdserve can read ({why}): correct it or choose another one."
        raise ConfigError([text]) from error


def _facts(folder: Path, config: dict[str, Any], *, multimodal: bool) -> ModelFacts:
    if "num_attention_heads" not in config and "state_size" in config:
        raise ValueError("its layers have a state and no attention; only vLLM by itself can serve it")
    heads = int(config["num_attention_heads"])
    window = _window(config)
    return ModelFacts(
        folder=folder,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        hidden=int(config["hidden_size"]),
        intermediate=int(config.get("intermediate_size") or 4 * config["hidden_size"]),
        vocab=int(config["vocab_size"]),
        max_len=_max_len(config),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        stored=_stored(folder),
        odd_layers=_odd_layers(config),
        window=window,
        only_windows=bool(window) and not _some_without_window(config),
        experts=next((_largest(config[key]) for key in _EXPERTS if config.get(key)), 0),
        expert_intermediate=_largest(
            config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
        ),
        latent=int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
        if config.get("kv_lora_rank")
        else 0,
        positions=int(config.get("max_position_embeddings") or 0),
        tied=bool(config.get("tie_word_embeddings", config.get("model_type") in _TIED)),
        multimodal=multimodal,
    )


def _largest(count: Any) -> int:
    """Return the largest value if each layer has its own."""
    return max(map(int, count)) if isinstance(count, list) else int(count)


def _odd_layers(config: dict[str, Any]) -> tuple[str, ...]:
    """Return unusual kinds of layers: from `layer_types` or, without it, from keys that match `_STATE_KEY`."""
    if kinds := config.get("layer_types"):
        return tuple(sorted(set(map(str, kinds)) - _ATTENTION))
    sizes = (key for key, value in config.items() if value and _STATE_KEY.match(key))
    return ("Mamba or linear attention",) if any(sizes) else ()


def _window(config: dict[str, Any]) -> int:
    """Return the tokens of the sliding window; 0 if there is none, or no prompt can be longer."""
    window, longest = (int(config.get(key) or 0) for key in ("sliding_window", "max_position_embeddings"))
    kinds = config.get("layer_types") or ("sliding_attention",)
    used = config.get("use_sliding_window", True) and "sliding_attention" in kinds
    return window if used and window > 0 and (not longest or window < longest) else 0


def _some_without_window(config: dict[str, Any]) -> bool:
    kinds = set(config.get("layer_types") or ())
    return (
        len(kinds) > 1
        or config.get("model_type") in _ALTERNATING
        or any(key.endswith(("sliding_window_pattern", "hybrid_layer_pattern")) for key in config)
    )


def _max_len(config: dict[str, Any]) -> int | None:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    longest = config.get("max_position_embeddings")
    return None if scaled or longest is None else int(longest)


def has_weights(folder: Path) -> bool:
    """Whether the folder has any file of weights that vLLM may load."""
    return any(file.suffix in _WEIGHTS for file in folder.iterdir())


def _stored(folder: Path) -> Mapping[str, int]:
    """Return bytes by dtype: from the headers of safetensors files, from their index if files are missing, or from the
    sizes of *.bin files. Empty if a part is missing and there is no index."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text("utf-8"))
        files = sorted(folder / name for name in set(content["weight_map"].values()))
        if not all(file.is_file() for file in files):
            return {"?": int(content["metadata"]["total_size"])}
    else:
        files = sorted(
            file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated")
        )
    binaries = sorted(folder.glob("*.bin"))
    if _parts_missing(files or binaries):
        return {}
    sizes: Counter[str] = Counter()
    for file in files:
        sizes.update(_header_sizes(file))
    if not sizes and binaries:
        return {"?": sum(file.stat().st_size for file in binaries)}
    return sizes


def _parts_missing(files: Sequence[Path]) -> bool:
    """Whether names such as model-00001-of-00019 show an incomplete download."""
    counts = [int(part[1]) for file in files if (part := _PART.search(file.stem))]
    return bool(counts) and len(counts) < max(counts)


def _header_sizes(file: Path) -> Counter[str]:
    """Return bytes by dtype. A safetensors file begins with the length of its header (8 bytes, little-endian), then the
    header as JSON: tensor name -> {dtype, shape, data_offsets}."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= _MAX_HEADER:
            raise ValueError(f"{file.name} is not a safetensors file")
        header = json.loads(stream.read(length))
    sizes: Counter[str] = Counter()
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            sizes[tensor["dtype"]] += end - start
    if file.stat().st_size < 8 + length + sizes.total():
        raise ValueError(f"{file.name} is incomplete: download it again")
    return sizes
