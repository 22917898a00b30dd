"""YAML to Config: strict, with every problem of a file found in one go.

Sections are those of a Dynamo 0.2 graph: Common, Frontend, Processor, VllmWorker, PrefillWorker; and Graph, which is
pdserve's own. As in Dynamo, a key of Common counts only in the sections that list it in `common-configs`, and not where
the section sets it itself; one that no section lists is an error. The environment wins over Graph: PDSERVE_NATS,
PDSERVE_ETCD, PDSERVE_STATE_DIR.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pdserve.config.arguments import arguments
from pdserve.config.host import resolve_model, with_home
from pdserve.config.schema import (
    Config,
    DecodeConfig,
    DecodeSection,
    FrontendConfig,
    FrontendSection,
    GraphSection,
    PrefillConfig,
    ProcessorSection,
    WorkerConfig,
    WorkerSection,
    etcd_address,
    nats_url,
)
from pdserve.config.sections import KINDS, SectionReader
from pdserve.config.tree import Entry, Findings, or_nearest, read_tree

W = TypeVar("W", bound=WorkerConfig)
Arguments = dict[str, Entry]
"""a section's vLLM arguments by canonical name"""

_SECTIONS = ("Common", *KINDS)
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
"""vLLM arguments that decode and prefill workers must have alike, because KV blocks cross from one engine into
another's cache, and why"""


def load(path: Path, env: Mapping[str, str] = os.environ) -> Config:
    """Read the file; whether this machine can run it is the plan's question. Raises ConfigError."""
    findings = Findings(path)
    tree = read_tree(path, findings)
    _check_names(tree, findings)
    sections = SectionReader(tree, findings)
    graph = sections.read("Graph", GraphSection)
    frontend = sections.read("Frontend", FrontendSection)
    processor, asked = sections.read_with_arguments("Processor", ProcessorSection)
    decode, decode_args = sections.read_with_arguments("VllmWorker", DecodeSection)
    prefill, prefill_args = sections.read_with_arguments("PrefillWorker", WorkerSection)
    sections.check_common()

    model = _model(tree, {"VllmWorker": decode_args, "PrefillWorker": prefill_args}, findings)
    _check_answers(prefill_args, findings)
    if "VllmWorker" in tree:
        decode_args |= _from_processor(asked, decode_args, findings)
    else:
        _from_processor(asked, prefill_args, findings)
    _check_split(tree, decode, sections, findings)
    if "VllmWorker" in tree and "PrefillWorker" in tree:
        _compare_workers(decode_args, prefill_args, findings)
    decode_config = DecodeConfig(**vars(decode), **_engine(decode_args))
    prefill_config = PrefillConfig(**vars(prefill), **_engine(prefill_args))
    decode_config = _with_gpus(decode_config, sections.own["VllmWorker"], findings)
    prefill_config = _with_gpus(prefill_config, sections.own["PrefillWorker"], findings)
    graph = _with_places(graph, env, findings)
    if endpoint := sections.own["Frontend"].get("endpoint"):
        findings.note(endpoint, " has no meaning here: the frontend finds its workers in etcd.")
    findings.raise_if_any()

    processes = {"processes": max(frontend.processes, processor.processes)}
    return Config(
        **vars(graph),
        path=path,
        model=resolve_model(model, path.parent),
        served_model_name=frontend.served_model_name or Path(model).name,
        frontend=FrontendConfig(**vars(frontend) | vars(processor) | processes)
        if "Frontend" in tree
        else None,
        decode=decode_config if "VllmWorker" in tree else None,
        prefill=prefill_config if "PrefillWorker" in tree else None,
        notes=tuple(findings.notes),
    )


def _check_names(tree: Mapping[str, Entry], findings: Findings) -> None:
    for name, entry in tree.items():
        if name not in _SECTIONS:
            hint = or_nearest(name, _SECTIONS, f"remove it, or use one of: {', '.join(_SECTIONS)}.")
            findings.problem(entry, f"is not a section: {hint}")


def _model(tree: Mapping[str, Entry], workers: Mapping[str, Arguments], findings: Findings) -> str:
    """The model of the workers as the file has it; empty where it has none."""
    models = []
    for section, args in workers.items():
        if section not in tree:
            continue
        if "model" not in args:
            text = (
                "has no model: set it in Common (demo, a folder or a hub id) and list it in common-configs."
            )
            findings.problem(tree[section], text)
            continue
        models.append(str(args["model"].value))
        try:
            resolve_model(models[-1], findings.path.parent)
        except ValueError as error:
            findings.problem(args["model"], str(error))
    return models[0] if models else ""


def _check_answers(prefill: Arguments, findings: Findings) -> None:
    for name, entry in prefill.items():
        if arguments()[name].group == "api":
            findings.problem(
                entry, "shapes answers, which prefill workers do not give: move it to Processor."
            )


def _from_processor(processor: Arguments, worker: Arguments, findings: Findings) -> Arguments:
    """The Processor's templates and parsers, which travel in the worker's model card. Whatever else a Processor says
    must be what its worker says too."""
    found = {}
    for name, entry in processor.items():
        if arguments()[name].group == "api" and name not in worker:
            found[name] = entry
        elif _effective(worker, name) != entry.value:
            other = f"says {_said(worker[name].value)}" if name in worker else "does not say so"
            text = f"the worker {other}: the processor follows its workers; set it there."
            findings.problem(entry, f"is {_said(entry.value)}, but {text}")
    return found


def _check_split(
    tree: Mapping[str, Entry], decode: DecodeSection, sections: SectionReader, findings: Findings
) -> None:
    """Prefill workers exist exactly where decode workers send prompts to them."""
    remote = sections.own["VllmWorker"].get("remote-prefill")
    if "VllmWorker" not in tree:
        if "PrefillWorker" not in tree:
            findings.whole("there is no VllmWorker section: add one, as in configs/local.yaml.")
    elif "PrefillWorker" not in tree:
        if remote and decode.remote_prefill:
            text = "is true, but there is no PrefillWorker section: add one, or set it to false."
            findings.problem(remote, text)
    elif not decode.remote_prefill and (remote is None or remote.value is False):
        text = "would never get work: set remote-prefill: true in VllmWorker, or remove this section."
        findings.problem(tree["PrefillWorker"], text)


def _compare_workers(decode: Arguments, prefill: Arguments, findings: Findings) -> None:
    for name, why in _ALIKE.items():
        ours, theirs = _effective(decode, name), _effective(prefill, name)
        if ours != theirs:
            text = (
                f"makes {name} {_said(ours)} in VllmWorker but {_said(theirs)} in PrefillWorker; {why}: "
                "set it once in Common and list it in the common-configs of both."
            )
            findings.problem(prefill.get(name) or decode[name], text)


def _effective(args: Arguments, name: str) -> object:
    if name in args:
        return args[name].value
    return None if name == "model" else arguments()[name].default


def _said(value: object) -> str:
    return "vLLM's default" if value is None else str(value)


def _engine(args: Arguments) -> dict[str, Any]:
    """The model is the graph's, not an argument of its engines."""
    kept = {name: entry for name, entry in args.items() if name != "model"}
    return {
        "engine_args": {name: entry.value for name, entry in kept.items()},
        "origins": {name: entry.section for name, entry in kept.items()},
    }


def _with_gpus(worker: W, own: Mapping[str, Entry], findings: Findings) -> W:
    """`gpu` and the engine's ranks must say the same: vLLM puts each rank on a GPU of its own."""
    ids, gpu = own.get("ServiceArgs.resources.gpu-ids"), own.get("ServiceArgs.resources.gpu")
    needed = worker.count * worker.ranks
    if ids and len(worker.gpu_ids) != needed:
        found = f"names {len(worker.gpu_ids)} GPUs, but {worker.count} x {worker.ranks} ranks need {needed}"
        findings.problem(ids, f"{found}: name {needed}.")
    if gpu and worker.gpus == 0 and worker.gpu_ids:
        findings.problem(gpu, "is 0, but gpu-ids names GPUs: keep one of the two.")
    elif gpu and worker.gpus and worker.engine == "vllm" and worker.gpus != worker.ranks:
        text = (
            f"is {worker.gpus}, but tensor-parallel-size x pipeline-parallel-size makes {worker.ranks}, one for "
            f"each GPU: set tensor-parallel-size: {worker.gpus} or gpu: {worker.ranks}."
        )
        findings.problem(gpu, text)
    return replace(worker, gpus=worker.ranks) if worker.gpu_ids and not gpu else worker


def _with_places(graph: GraphSection, env: Mapping[str, str], findings: Findings) -> GraphSection:
    """With the addresses that the environment names, and the folder."""

    def named(variable: str, check: Callable[[str], str]) -> str | None:
        """An empty variable counts as not set."""
        try:
            return check(env[variable]) if env.get(variable) else None
        except ValueError as error:
            findings.whole(str(error), of=f"Environment variable {variable}")
            return None

    nats, etcd = named("PDSERVE_NATS", nats_url), named("PDSERVE_ETCD", etcd_address)
    state_dir = _state_dir(graph, env.get("PDSERVE_STATE_DIR"), findings)
    return replace(graph, nats=nats or graph.nats, etcd=etcd or graph.etcd, state_dir=state_dir)


def _state_dir(graph: GraphSection, named: str | None, findings: Findings) -> Path:
    try:
        folder = with_home(Path(named) if named else graph.state_dir)
    except ValueError as error:
        findings.whole(
            str(error), of="Environment variable PDSERVE_STATE_DIR" if named else "Graph.state-dir"
        )
        return graph.state_dir
    return (Path.cwd() if named else findings.path.parent).joinpath(folder).resolve()
