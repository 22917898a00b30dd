"""The yardstick: one plain vLLM engine, no graph, no prefix cache, one prompt at a time.

`python -m tests.e2e.reference IN OUT [--dtype float32]` reads a JSON list of `{"prompt": [ids], "max_tokens": n}`
and writes `{"alone": [greedy token ids of each], "together": [the same with all prompts in shared batches]}`. Where the
two differ, batching alone changes the numbers, and identity cannot be asked of the graph in that dtype.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from pdserve.demo import MODEL_DIR


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    cases = json.loads(args.input.read_text())
    args.output.write_text(json.dumps(generate(cases, args.dtype)))


def generate(cases: list[dict[str, Any]], dtype: str) -> dict[str, list[list[int]]]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(MODEL_DIR),
        dtype=dtype,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=4096,
        disable_log_stats=True,
    )
    prompts = [{"prompt_token_ids": case["prompt"]} for case in cases]
    params = [
        SamplingParams(temperature=0, max_tokens=case["max_tokens"], ignore_eos=True, detokenize=False)
        for case in cases
    ]
    alone = [engine.generate([p], [s], use_tqdm=False)[0] for p, s in zip(prompts, params, strict=True)]
    together = engine.generate(prompts, params, use_tqdm=False)
    return {"alone": _tokens(alone), "together": _tokens(together)}


def _tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main()
