"""What the sections must say alike, because KV blocks cross from one engine into another's cache."""

from pdserve.config.arguments import arguments
from pdserve.config.findings import Findings
from pdserve.config.workers import Arguments

_ALIKE = {
    "model": "the KV of one model means nothing to another",
    "revision": "the KV of one model means nothing to another",
    "hf-overrides": "the KV of one model means nothing to another",
    "load-format": "the KV of one model means nothing to another",
    "dtype": "KV blocks are moved byte by byte",
    "kv-cache-dtype": "KV blocks are moved byte by byte",
    "quantization": "KV blocks are moved byte by byte",
    "block-size": "unequal KV blocks give wrong tokens",
    "max-model-len": "a prompt that one side takes must fit the other",
}
"""arguments that decode and prefill workers must have alike, and why"""


def compare_workers(decode: Arguments, prefill: Arguments, findings: Findings) -> None:
    for name, why in _ALIKE.items():
        ours, theirs = _effective(decode, name), _effective(prefill, name)
        if ours == theirs:
            continue
        entry = prefill.entries.get(name) or decode.entries[name]
        text = (
            f"makes {name} {_said(ours)} in VllmWorker but {_said(theirs)} in PrefillWorker; {why}: "
            "set it once in Common and list it in the common-configs of both."
        )
        findings.problem(entry.line, entry.path, text)


def merge_processor(processor: Arguments, worker: Arguments, findings: Findings) -> Arguments:
    """The worker's arguments with the Processor's templates and parsers, which travel in the worker's model
    card. Whatever else a Processor says must be what its worker says too."""
    for name, value in processor.values.items():
        entry, known = processor.entries[name], name in worker.values
        if arguments()[name].group == "api" and not known:
            worker.put(name, value, entry)
        elif _effective(worker, name) != value:
            other = f"says {_said(worker.values[name])}" if known else "does not say so"
            text = (
                f"is {_said(value)}, but the worker {other}: the processor follows its workers; set it there."
            )
            findings.problem(entry.line, entry.path, text)
    return worker


def _effective(args: Arguments, name: str) -> object:
    return args.values.get(name, None if name == "model" else arguments()[name].default)


def _said(value: object) -> str:
    return "vLLM's default" if value is None else str(value)
