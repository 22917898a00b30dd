"""Explains how pdserve serves a model, by the kinds of its layers, for `pdserve plan --explain`."""

from collections.abc import Iterator

from pdserve.config.schema import Config
from pdserve.plan.model_folder import ModelFacts
from pdserve.plan.transfer import kv_moves


def explain(config: Config, model: ModelFacts) -> Iterator[str]:
    """Yield full sentences."""
    yield from _attention(model, kv_moves(config))
    yield from _ranks(config, model)
    if model.experts:
        yield (
            f"Mixture of experts: each worker loads all {model.experts} experts of a layer, and its ranks share them. "
            "Activations are planned as those of a dense layer, and may take more."
        )
    if model.multimodal:
        yield "It takes more than text: images are served; requests with sound or video are refused."


def _attention(model: ModelFacts, moves: bool) -> Iterator[str]:
    if model.stateful_layers:
        kinds = " and ".join(model.stateful_layers)
        alone = "Each worker prefills and decodes its own requests; memory is not estimated."
        yield f"Hybrid: layers of {kinds} have a state of fixed size per request, which cannot move. {alone}"
    elif model.latent:
        yield (
            f"Latent attention (MLA): a token's KV is one entry of {model.latent} numbers in each of {model.layers} "
            "layers, for all heads, and each rank has all of it."
        )
    else:
        shared = f", shared by {model.heads} query heads" if model.kv_heads < model.heads else ""
        sizes = f"{model.kv_heads} heads of {model.head_dim} numbers{shared}"
        yield f"Attention: a token's K and V are {sizes}, in each of {model.layers} layers."
    if model.window:
        which = "All" if model.only_windows else "Some"
        kept = "vLLM frees KV that has left the window, but the plan counts it"
        if moves:
            kept = "KV of the whole prompt is kept and moved (remote-prefill: false frees KV that has left the window)"
        yield f"{which} layers have a sliding window of {model.window:,} tokens: {kept}."


def _ranks(config: Config, model: ModelFacts) -> Iterator[str]:
    """Explain which ranks read KV from which."""
    decode, prefill = config.decode, config.prefill
    if decode is None or prefill is None or decode.ranks == prefill.ranks == 1:
        return
    few, many = sorted((decode.ranks, prefill.ranks))
    if model.latent or few == many:
        yield f"Each of the {decode.ranks} decode ranks reads KV from one of the {prefill.ranks} prefill ranks."
    elif decode.ranks > prefill.ranks:
        part = (
            "a KV head that others read, too" if decode.ranks > model.kv_heads else "a part of its KV heads"
        )
        yield f"{many // few} decode ranks read from each prefill rank, each {part}."
    else:
        yield f"Each decode rank reads from {many // few} prefill ranks, and joins their KV heads."
