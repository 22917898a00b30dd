"""Trains the demo model: `python -m tools.demo_model.train` writes tokenizer, config and weights into `MODEL_DIR`.

Data and weights come from a seed, and one CPU thread is enough. A curriculum makes it quick: first short documents with
many look-ups, from which the model learns to copy, then longer ones.
"""

import argparse
import logging
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW, Muon
from transformers import Qwen2ForCausalLM

from pdserve.demo import MODEL_DIR
from tools.demo_model import corpus
from tools.demo_model.architecture import build_model, save
from tools.demo_model.evaluate import report
from tools.demo_model.tokenizer import MAX_POSITIONS, build_tokenizer, tokenizer_lines

logger = logging.getLogger(__name__)
IGNORED = 0  # the pad token; its weight in the loss is zero


@dataclass(frozen=True)
class Stage:
    mix: corpus.Mix
    batch: int
    steps: int
    stretch: float = 0.5  # share of documents whose positions are stretched


CURRICULUM = (
    # Ledgers: codes of one digit, then more text between key and code, then whole codes.
    Stage(corpus.Mix(tokens=64, ledger=1.0, digits=1), batch=48, steps=110, stretch=0.0),
    Stage(corpus.Mix(tokens=64, ledger=1.0, digits=1, joints=3), batch=48, steps=60),
    Stage(corpus.Mix(tokens=80, ledger=1.0, digits=1, joints=9), batch=48, steps=70),
    Stage(corpus.Mix(tokens=96, ledger=1.0, joints=9), batch=48, steps=70),
    # Prose, then chats and small talk, in ever longer documents.
    Stage(corpus.Mix(tokens=96, raw=1.0, again=0.9, canonical=1.0), batch=32, steps=50),
    Stage(corpus.Mix(tokens=96, talk=0.03, raw=0.5, again=0.3, canonical=0.7), batch=32, steps=250),
    Stage(corpus.Mix(tokens=256, talk=0.2, ledger=0.15, joints=9), batch=16, steps=250),
    Stage(corpus.Mix(tokens=512, talk=0.2, ledger=0.15, joints=9), batch=8, steps=275),
    Stage(corpus.Mix(tokens=1024, talk=0.15, ledger=0.15, joints=9, context=(0.4, 0.9)), batch=4, steps=300),
    Stage(corpus.Mix(tokens=2048, talk=0.1, context=(0.4, 0.9)), batch=3, steps=175),
    Stage(corpus.Mix(tokens=3584, talk=0.1, context=(0.4, 0.9)), batch=2, steps=115),
)


@dataclass
class Batch:
    """Padded documents. Each tensor is `[documents, tokens]`."""

    ids: Tensor
    positions: Tensor
    weights: Tensor


def stretch(rng: random.Random, segments: list[corpus.Segment], length: int) -> list[int]:
    """Return positions with up to four random gaps between sentences, below `MAX_POSITIONS`.

    So a short document trains the distances of a long one.
    """
    breaks = [i for i, segment in enumerate(segments) if segment.breaks and i]
    room = MAX_POSITIONS - length
    gaps = dict.fromkeys(rng.sample(breaks, min(len(breaks), rng.randint(1, 4))), 0)
    for i in gaps:
        gaps[i] = int(room / len(gaps) * rng.random() ** 2)
    positions: list[int] = []
    at = 0
    for i, segment in enumerate(segments):
        at += gaps.get(i, 0)
        positions.extend(range(at, at + len(segment.ids)))
        at += len(segment.ids)
    return positions


def make_batch(rng: random.Random, stage: Stage, encode: corpus.Encode) -> Batch:
    """Sample documents, and cut or pad them to one length."""
    width = stage.mix.tokens
    ids = torch.full((stage.batch, width), IGNORED)
    positions = torch.arange(width).repeat(stage.batch, 1)
    weights = torch.zeros(stage.batch, width)
    for row in range(stage.batch):
        segments = corpus.document(rng, stage.mix, encode)
        flat = [token for segment in segments for token in segment.ids][:width]
        ids[row, : len(flat)] = torch.tensor(flat)
        flat_weights = [segment.weight for segment in segments for _ in segment.ids][:width]
        weights[row, : len(flat)] = torch.tensor(flat_weights)
        if rng.random() < stage.stretch:
            positions[row, : len(flat)] = torch.tensor(stretch(rng, segments, len(flat))[:width])
    return Batch(ids, positions, weights)


def loss_of(model: Qwen2ForCausalLM, batch: Batch, rng: torch.Generator) -> tuple[Tensor, float, float]:
    """Return the weighted cross entropy, and the accuracy of first digits and of other digits.

    A tenth of the tokens without a weight gets a small weight, so that completions are fluent.
    """
    sampled = torch.rand(batch.weights.shape, generator=rng) < 0.1
    weights = torch.where((batch.weights == 0) & sampled & (batch.ids != IGNORED), 0.05, batch.weights)[:, 1:]
    chosen = weights > 0
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=batch.ids, position_ids=batch.positions).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][chosen])
    targets, weights = batch.ids[:, 1:][chosen], weights[chosen]
    losses = functional.cross_entropy(logits.float(), targets, reduction="none")
    right = logits.argmax(-1) == targets
    first, rest = (float(right[weights == weight].float().mean()) for weight in (corpus.FIRST, corpus.ANSWER))
    return (losses * weights).sum() / weights.sum(), first, rest


def optimizers(model: Qwen2ForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, because it needs far fewer steps, and AdamW for all other weights."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.model.layers.parameters() if p.ndim != 2]
    rest += [model.model.embed_tokens.weight, model.model.norm.weight]
    return [
        Muon(matrices, lr=1.5e-2, weight_decay=0.01, momentum=0.95),
        AdamW(rest, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def schedule(step: int, total: int) -> float:
    """Warm up over 50 steps, hold, then decline linearly over the second half."""
    return min(1.0, (step + 1) / 50, (total - step) / (0.5 * total))


def train(model: Qwen2ForCausalLM, encode: corpus.Encode, stages: tuple[Stage, ...], seed: int) -> None:
    tools = optimizers(model)
    groups = [group for tool in tools for group in tool.param_groups]
    rates = [group["lr"] for group in groups]
    total, step = sum(stage.steps for stage in stages), 0
    model.train()
    for number, stage in enumerate(stages):
        rng, generator = random.Random(seed + number), torch.Generator().manual_seed(seed + number)
        # Eager attention is faster than the fused kernel for short documents.
        model.set_attn_implementation("eager" if stage.mix.tokens <= 256 else "sdpa")
        for _ in range(stage.steps):
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * schedule(step, total)
            loss, first, rest = loss_of(model, make_batch(rng, stage, encode), generator)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for tool in tools:
                tool.step()
                tool.zero_grad(set_to_none=True)
            if step % 25 == 0:
                logger.info(
                    "%5.0f s  step %4d/%d  %4d tokens  loss %.3f  right: first digit %.1f%%, others %.1f%%",
                    *(time.process_time(), step, total, stage.mix.tokens),
                    *(loss.item(), 100 * first, 100 * rest),
                )
            step += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=MODEL_DIR)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer(tokenizer_lines())
    model = build_model(tokenizer)
    train(model, lambda text: list(tokenizer.encode(text).ids), CURRICULUM, options.seed)
    logger.info("trained in %.0f s of one thread", time.process_time())
    save(model, tokenizer, options.output)
    report(options.output)


if __name__ == "__main__":
    main()
