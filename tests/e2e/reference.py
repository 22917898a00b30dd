"""The yardstick: one plain vLLM engine, no graph, no prefix cache, one prompt at a time.

`python -m tests.e2e.reference IN OUT [--dtype float32] [--together]` reads a JSON list of
`{"prompt": [token ids], "max_tokens": n}` and writes the list of greedy token ids for each. With `--together` all
prompts share the engine's batches, which shows what batching alone does to the numbers.
"""

import argparse
import json
import os
from pathlib import Path

from pdserve.demo import MODEL_DIR


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--together", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    cases = json.loads(args.input.read_text())
    args.output.write_text(json.dumps(generate(cases, args.dtype, args.together)))


def generate(cases: list[dict[str, object]], dtype: str, together: bool) -> list[list[int]]:
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
    batches = [(prompts, params)] if together else [([p], [s]) for p, s in zip(prompts, params, strict=True)]
    outputs = [out for p, s in batches for out in engine.generate(p, s, use_tqdm=False)]
    return [list(out.outputs[0].token_ids) for out in outputs]


if __name__ == "__main__":
    main()
