"""Checks that KV can move from prefill workers to decode workers: ranks, kinds of layers, lengths of prompts."""

from collections.abc import Iterator, Sequence

from pdserve.config.files.shared_args import length_changes_kv
from pdserve.config.schema import Config
from pdserve.plan.memory import max_model_len, tensor_size
from pdserve.plan.model_folder import ModelFacts
from pdserve.plan.slots import PlannedWorker


def ranks_meet(config: Config, model: ModelFacts | None) -> Iterator[str]:
    """Check the numbers of ranks. A decode rank reads some KV heads of one prefill rank, or all KV heads of several;
    vLLM's connector refuses the rest (`TransferTopology.tp_ratio`, `_validate_remote_agent_handshake`)."""
    decode, prefill = config.decode, config.prefill
    if decode is None or prefill is None:
        return
    reads, has = tensor_size(decode.engine_args), tensor_size(prefill.engine_args)
    if max(reads, has) % min(reads, has):
        yield (
            f"tensor-parallel-size {reads} of decode cannot read KV from {has} of prefill: make one a multiple of the "
            "other."
        )
    elif has > reads and model and not model.latent and has > model.kv_heads:
        yield (
            f"tensor-parallel-size {reads} of decode cannot read KV from {has} of prefill, which has copies of the "
            f"model's {model.kv_heads} KV heads: lower it to {model.kv_heads} for prefill, or raise it to {has} for "
            "decode."
        )


def layers_move(config: Config, model: ModelFacts | None, workers: Sequence[PlannedWorker]) -> Iterator[str]:
    """Check the kinds of layers. KV moves in blocks, which do not hold the state of layers such as Mamba. If all layers
    have a sliding window, vLLM keeps only the last blocks of a prompt."""
    if model is None or not kv_moves(config):
        return
    alone = "set remote-prefill: false, and leave out PrefillWorker"
    if model.stateful_layers:
        yield (
            f"The model has layers of {' and '.join(model.stateful_layers)}, whose state is not in KV blocks and "
            f"cannot move from prefill to decode workers: {alone}."
        )
    longest = max(max_model_len(model, worker.config.engine_args) for worker in workers)
    whole = all(worker.config.engine_args.get("disable-sliding-window") is True for worker in workers)
    overrides = "".join(str(worker.config.engine_args.get("hf-overrides", "")) for worker in workers)
    changed = "sliding_window" in overrides or "layer_types" in overrides
    if model.only_windows and longest > model.window and not whole and not changed:
        yield (
            f"All layers of the model have a sliding window of {model.window:,} tokens, and the KV of longer prompts "
            f"cannot move from prefill to decode workers: set disable-sliding-window: true and max-model-len: "
            f"{model.window} for both, or {alone}."
        )


def one_length(config: Config, model: ModelFacts | None) -> Iterator[str]:
    lengths = [each.engine_args.get("max-model-len") for each in (config.decode, config.prefill) if each]
    args = config.prefill.engine_args if config.prefill else {}
    if model and len({*map(str, lengths)}) > 1 and length_changes_kv(model.folder, args):
        yield (
            "max-model-len differs between VllmWorker and PrefillWorker, and the KV of a model of this kind depends on "
            "it: set it once in Common and list it in the common-configs of both."
        )


def kv_moves(config: Config) -> bool:
    return config.decode is None or config.decode.remote_prefill
