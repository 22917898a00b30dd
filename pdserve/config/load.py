"""Loads a YAML file into a Config. It is strict, and reports all problems of a file at once.

The sections are those of a Dynamo 0.2 graph (Common, Frontend, Processor, VllmWorker, PrefillWorker), and pdserve's own
Graph, Slo and Security. A key of Common applies only to sections that list it in `common-configs` and do not set it
themselves. Environment variables win over the file: pdserve's own (`env_overrides.py`) and OpenTelemetry's.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pdserve.config.addresses import collector_url, traces_url
from pdserve.config.api_keys import requires_key
from pdserve.config.engine_args.arguments import arguments, shapes_response
from pdserve.config.engine_args.installed import (
    SIMULATED_VARIABLE,
    expand_home,
    find_folder,
    is_simulated,
    resolve_model,
)
from pdserve.config.engine_args.removed import is_vllm_config
from pdserve.config.env_overrides import with_environment
from pdserve.config.exposure import openings
from pdserve.config.files.dynamo import from_dynamo, is_dynamo
from pdserve.config.files.shared_args import (
    Arguments,
    compare_workers,
    effective,
    follow_decode,
    shown,
    values_of,
    without_stand_in,
)
from pdserve.config.files.yaml_tree import Entry, Findings, did_you_mean, read_tree
from pdserve.config.lora_modules import adapter_capacity, static_adapters
from pdserve.config.schema import (
    Config,
    DecodeConfig,
    DecodeSection,
    FrontendConfig,
    FrontendSection,
    GraphSection,
    PrefillConfig,
    PrefillSection,
    ProcessorSection,
    SecuritySection,
    SloSection,
    WorkerConfig,
    share_of_gpu,
)
from pdserve.config.sections import KINDS, SectionRead, SectionReader
from pdserve.contract.live_settings import THRESHOLDS
from pdserve.contract.slo import SloTargets
from pdserve.util.errors import ConfigError
from pdserve.util.program import pdserve_command

W = TypeVar("W", bound=WorkerConfig)
_SECTIONS = ("Common", *KINDS)
_OF_THE_TOKENIZER = (
    *("tokenizer", "tokenizer-mode", "tokenizer-revision", "revision", "config-format", "hf-config-path"),
    *("hf-overrides", "chat-template", "tool-call-parser", "enable-auto-tool-choice", "reasoning-parser"),
)
"""vLLM arguments that fit only the model's own tokenizer."""


def load(path: Path, env: Mapping[str, str] = os.environ) -> Config:
    """Load the file. Raises ConfigError with all its problems. The plan checks that the graph fits this machine."""
    findings = Findings(path)
    tree = read_tree(path, findings)
    _check_format(tree, path)
    if dynamo := is_dynamo(tree):
        tree = from_dynamo(tree, findings)
    _check_names(tree, findings)
    tree, from_environment = with_environment(tree, env)
    sections = SectionReader(tree, findings)
    graph = sections.read("Graph", GraphSection)
    frontend = sections.read("Frontend", FrontendSection)
    processor = sections.read("Processor", ProcessorSection)
    decode = sections.read("VllmWorker", DecodeSection)
    prefill = sections.read("PrefillWorker", PrefillSection)
    security = sections.read("Security", SecuritySection)
    slo = sections.read("Slo", SloSection).values
    sections.check_common()

    model = _model((decode, prefill), findings)
    elsewhere = bool(graph.values.nats and graph.values.etcd)
    _check_split(decode, prefill, elsewhere, findings)
    _check_prefill(prefill.args, findings)
    _follow_processor(processor.args, decode.args if decode.entry else dict(prefill.args), findings)
    _check_parsers(decode.args if decode.entry else processor.args, findings)
    if decode.entry and prefill.entry:
        if adapters := decode.args.get("lora-modules"):
            prefill.args.setdefault("lora-modules", adapters)
        compare_workers(decode.args, prefill.args, findings)
        prefill = without_stand_in(decode.args, prefill, findings)
        if prefill.values.stand_in:
            follow_decode(decode.args, prefill.args, findings)
    for worker in (decode.args, prefill.args):
        _check_adapters(worker, frontend.values.served_model_name or Path(model).name, findings)
    graph_values = _resolved(graph.values, env, findings)
    _check_replicas(graph, findings)
    _check_security(security, findings)
    if dynamo and not elsewhere and (decode.entry or prefill.entry):
        frontend = _default_frontend(frontend, findings)
    frontend_config = _frontend(frontend, processor.values)
    decode_config = _worker(DecodeConfig, _with_policy(decode, findings), findings)
    prefill_config = _worker(PrefillConfig, prefill, findings)
    addresses = {"Graph": graph.own, "Frontend": frontend.own}
    needs_key = requires_key(security.values, env)
    for section, key, problem in openings(graph_values, frontend_config, security.values, needs_key):
        findings.problem(addresses[section][key], problem)
    findings.raise_if_any()
    config = Config(
        **vars(graph_values),
        path=path,
        model=resolve_model(model, path.parent),
        served_model_name=frontend.values.served_model_name or Path(model).name,
        frontend=frontend_config,
        decode=decode_config,
        prefill=prefill_config,
        security=security.values,
        slo=SloTargets(slo.ttft, slo.gap),
        from_environment=from_environment,
        notes=tuple(findings.notes),
    )
    return _simulated(config) if is_simulated(env) else config


def _check_replicas(graph: SectionRead[GraphSection], findings: Findings) -> None:
    if (replicas := graph.own.get("queue-replicas")) and graph.values.nats is None:
        text = "needs Graph.nats: the one server that `serve` starts keeps one copy."
        findings.problem(replicas, f"is {shown(replicas.value)}, which {text}")


def _check_format(tree: Mapping[str, Entry], path: Path) -> None:
    """Raise ConfigError with one sentence for a file of another tool, instead of one for each of its keys."""
    manifest = "apiVersion" in tree and "kind" in tree
    if manifest or (is_vllm_config(tree) and tree.keys().isdisjoint(_SECTIONS)):
        what = "a Kubernetes manifest" if manifest else "a file of `vllm serve --config`"
        way = pdserve_command(f"init graph.yaml --from {path}")
        raise ConfigError([f"{path} is {what}, not a graph: `{way}` makes a graph of it."])


def _check_names(tree: Mapping[str, Entry], findings: Findings) -> None:
    for name, entry in tree.items():
        if name not in _SECTIONS:
            hint = did_you_mean(name, _SECTIONS, f"remove it, or use one of: {', '.join(_SECTIONS)}.")
            findings.problem(entry, f"is not a section: {hint}")


def _model(workers: Iterable[SectionRead[Any]], findings: Findings) -> str:
    """Return the workers' model as the file has it; empty if there is none."""
    models = []
    for worker in workers:
        if worker.entry is None:
            continue
        if (model := worker.args.get("model")) is None:
            text = "set it in Common (demo, a folder or a hub id) and list it in common-configs."
            findings.problem(worker.entry, f"has no model: {text}")
            continue
        models.append(str(model.value))
        try:
            resolve_model(models[-1], findings.path.parent)
        except ValueError as error:
            findings.problem(model, str(error))
    return models[0] if models else ""


def _check_split(
    decode: SectionRead[DecodeSection],
    prefill: SectionRead[PrefillSection],
    elsewhere: bool,
    findings: Findings,
) -> None:
    """Check that there are prefill workers if, and only if, decode workers send prompts to them. `elsewhere`: the file
    names NATS and etcd, so that prefill workers may run on other hosts, with files of their own."""
    remote = decode.own.get("remote-prefill")
    if not decode.entry and not prefill.entry:
        findings.problem_without_line(
            f"there is no VllmWorker section: add one; `{pdserve_command('init graph.yaml')}` writes a file with one."
        )
    both = decode.own.get("role") if decode.values.role == "both" else None
    if remote and decode.values.remote_prefill and not prefill.entry and not both and not elsewhere:
        text = (
            "is true, but there is no PrefillWorker section: add one, set role: both, or set it to false. If prefill "
            "workers run on other hosts, set Graph.nats and Graph.etcd to the servers that all hosts share."
        )
        findings.problem(remote, text)
    if both and not decode.values.remote_prefill:
        findings.problem(both, "is both, but no prompt is ever sent: set remote-prefill: true beside it.")
    elif decode.entry and prefill.entry and (remote is None or remote.value is False):
        text = "would never get a prompt: set remote-prefill: true in VllmWorker, or remove this section."
        findings.problem(prefill.entry, text)


def _with_policy(decode: SectionRead[DecodeSection], findings: Findings) -> SectionRead[DecodeSection]:
    """Fill in a missing policy: `threshold` if the file sets a threshold, else `adaptive`."""
    thresholds = [name for name in THRESHOLDS if name in decode.own]
    if decode.values.policy == "adaptive":
        for name in thresholds:
            text = "has no effect under policy: adaptive; remove it, or set policy: threshold."
            findings.problem(decode.own[name], text)
    policy = decode.values.policy or ("threshold" if thresholds else "adaptive")
    return replace(decode, values=replace(decode.values, policy=policy))


def _check_prefill(args: Arguments, findings: Findings) -> None:
    for name, entry in args.items():
        if arguments()[name].group == "api" and name != "lora-modules":
            text = "changes responses, which prefill workers do not send: move it to Processor."
            findings.problem(entry, text)


def _follow_processor(processor: Arguments, worker: Arguments, findings: Findings) -> None:
    """Give the worker the Processor's templates and parsers that it lacks: its model card takes them to frontends.
    Report every other argument of the Processor that differs from the worker's."""
    for name, entry in processor.items():
        if shapes_response(name) and name not in worker:
            worker[name] = entry
        elif "model" in worker and effective(worker, name) != entry.value:
            other = f"has {shown(worker[name].value)}" if name in worker else "does not set it"
            text = f"is {shown(entry.value)}, but the worker {other}, and the worker's value counts: set it there."
            findings.problem(entry, text)


def _check_parsers(args: Arguments, findings: Findings) -> None:
    """Report unknown parsers, which vLLM reports only after its engine has started."""
    for kind in ("tool", "reasoning"):
        name, plugin = f"{kind}{'-call' * (kind == 'tool')}-parser", f"{kind}-parser-plugin"
        entry, known = args.get(name), arguments()[name].names
        if entry and entry.value not in known and plugin not in args:
            hint = did_you_mean(str(entry.value), known, f"use one of: {', '.join(known)}.")
            text = f"is {entry.value}, which vLLM does not have (set {plugin} if a plugin has it): {hint}"
            findings.problem(entry, text)
    auto = args.get("enable-auto-tool-choice")
    if auto and auto.value and "tool-call-parser" not in args:
        text = "needs tool-call-parser beside it: the format of the model's calls (hermes for Qwen)."
        findings.problem(auto, text)
    elif (parser := args.get("tool-call-parser")) and not (auto and auto.value):
        findings.note(parser, " has no effect without enable-auto-tool-choice: true.")


def _check_adapters(args: Arguments, served: str, findings: Findings) -> None:
    """Check the names of LoRA adapters, and that the engine holds all at once: if it loaded one a second time, the
    folder might have other weights by then."""
    if (entry := args.get("lora-modules")) is None:
        return
    found = static_adapters({"lora-modules": entry.value})
    most = adapter_capacity(values_of(args))
    if not all(found) or not all(found.values()):
        findings.problem(entry, "must be a list of name=folder, or of mappings with name and path.")
    elif isinstance(entry.value, list) and len(found) < len(entry.value):
        findings.problem(entry, "names an adapter twice.")
    elif served in found:
        findings.problem(entry, f"names an adapter {served}, like the model: choose another name.")
    elif not most:
        findings.problem(entry, "needs enable-lora: true beside it, for all workers.")
    elif len(found) > most:
        text = f"names {len(found)} adapters, but the engine holds {most}: set max-cpu-loras: {len(found)}."
        findings.problem(entry, text)


def _default_frontend(
    section: SectionRead[FrontendSection], findings: Findings
) -> SectionRead[FrontendSection]:
    """Add a frontend to a Dynamo file that has none: `serve` starts NATS and etcd, so no other host has a frontend."""
    if section.entry is not None:
        return section
    findings.notes.append(f"{findings.path}: there is no Frontend section: one frontend serves at port 8000.")
    return replace(section, entry=Entry("Frontend", 0))


def _frontend(section: SectionRead[FrontendSection], processor: ProcessorSection) -> FrontendConfig | None:
    if section.entry is None:
        return None
    keys = vars(section.values) | vars(processor)
    keys |= {"processes": max(section.values.processes, processor.processes)}
    return FrontendConfig(**{field.name: keys[field.name] for field in fields(FrontendConfig)})


def _worker(kind: type[W], section: SectionRead[Any], findings: Findings) -> W | None:
    if section.entry is None:
        return None
    args = {name: entry for name, entry in section.args.items() if name != "model"}
    values = values_of(args)
    origins = {name: entry.section for name, entry in args.items()}
    gpu = section.own.get("ServiceArgs.resources.gpu")
    share = share_of_gpu(gpu.value if gpu else None)
    worker = kind(**vars(section.values), engine_args=values, origins=origins, share=share)
    _check_nodes(worker, args, findings)
    _check_gpus(worker, section.own, findings)
    return replace(worker, gpus=worker.ranks) if worker.gpus is None and worker.gpu_ids else worker


def _simulated(config: Config) -> Config:
    """Simulate all engines, even of a model that is not on this host."""
    is_absent = find_folder(config.model) is None
    absent = f"{config.model} is not on this host: the demo model's tokenizer replaces its own."
    return replace(
        config,
        model=resolve_model("demo", config.path.parent) if is_absent else config.model,
        decode=_simulated_worker(config.decode, is_absent),
        prefill=_simulated_worker(config.prefill, is_absent),
        from_environment=(*config.from_environment, f"{SIMULATED_VARIABLE} (engine: sim)"),
        notes=(*config.notes, *[absent] * is_absent),
    )


def _simulated_worker(worker: W | None, is_absent: bool) -> W | None:
    """Leave out KV in host memory and on disk, which a simulated engine does not have. If the model is absent, also
    leave out what fits only its tokenizer."""
    if worker is None:
        return None
    args = {k: v for k, v in worker.engine_args.items() if not is_absent or k not in _OF_THE_TOKENIZER}
    if is_absent and (longest := args.get("max-model-len")):  # perhaps longer than the demo model's
        args["hf-overrides"] = {"max_position_embeddings": longest}
    return replace(worker, engine="sim", kv_offload=0, kv_offload_disk=0, engine_args=args)


def _check_nodes(worker: WorkerConfig, args: Arguments, findings: Findings) -> None:
    if worker.nodes == 1:
        return
    if worker.ranks % worker.nodes or worker.ranks < worker.nodes:
        text = (
            f"is {worker.nodes}, but the {worker.ranks} ranks (tensor-parallel-size) are not a multiple of it"
        )
        findings.problem(args["nnodes"], f"{text}: change one of the two.")
    backend = args.get("distributed-executor-backend")
    if backend and backend.value != "mp":
        text = f"is {backend.value}, but nnodes works with vLLM's own mp only: remove one of the two."
        findings.problem(backend, text)


def _check_gpus(worker: WorkerConfig, own: Mapping[str, Entry], findings: Findings) -> None:
    """Check `gpu` against the ranks of one worker, and `gpu-ids` against those of all: each rank needs one GPU."""
    ids, gpu = own.get("ServiceArgs.resources.gpu-ids"), own.get("ServiceArgs.resources.gpu")
    needed = worker.count * worker.ranks
    if ids and worker.nodes > 1:
        text = "names GPUs of one host, but nnodes needs several hosts: set CUDA_VISIBLE_DEVICES on each."
        findings.problem(ids, text)
    elif ids and len(worker.gpu_ids) != needed:
        named = f"names {len(worker.gpu_ids)} GPUs, but {worker.count} x {worker.ranks} ranks need {needed}"
        findings.problem(ids, f"{named}: name {needed}.")
    if gpu and worker.gpus == 0 and worker.gpu_ids:
        findings.problem(gpu, "is 0, but gpu-ids names GPUs: keep one of the two.")
    if gpu and worker.engine == "vllm" and worker.gpus not in (None, 0, worker.ranks):
        text = (
            f"is {gpu.value}, but tensor-parallel-size x pipeline-parallel-size makes {worker.ranks}, one for "
            f"each GPU: set tensor-parallel-size: {worker.gpus} or gpu: {worker.ranks}."
        )
        findings.problem(gpu, text)


def _resolved(graph: GraphSection, env: Mapping[str, str], findings: Findings) -> GraphSection:
    """Return the Graph section with an absolute state directory, and the trace collector of the environment."""

    def checked(variable: str, check: Callable[[str], str]) -> str | None:
        try:
            return check(env[variable]) if env.get(variable) else None
        except ValueError as error:
            findings.problem_without_line(str(error), subject=f"Environment variable {variable}")
            return None

    traces = checked("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector_url)
    traces = traces or checked("OTEL_EXPORTER_OTLP_ENDPOINT", traces_url)
    protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if traces and protocol not in (None, "", "http/protobuf"):
        traces = None
        findings.notes.append(
            f"The collector of OTEL_EXPORTER_OTLP_* gets no traces: it takes {protocol}, pdserve sends http/protobuf."
        )
    disabled = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    endpoint = None if disabled else traces or graph.otlp_endpoint
    return replace(graph, state_dir=_state_dir(graph, findings), otlp_endpoint=endpoint)


def _check_security(security: SectionRead[SecuritySection], findings: Findings) -> None:
    for one, other in (("tls-certificate", "tls-key"), ("tls-key", "tls-certificate")):
        if one in security.own and other not in security.own:
            findings.problem(security.own[one], f"needs {other} beside it.")


def _state_dir(graph: GraphSection, findings: Findings) -> Path:
    try:
        return expand_home(graph.state_dir).resolve()
    except ValueError as error:  # the default begins with ~, and this user has no home folder
        findings.problem_without_line(str(error), subject="Graph.state-dir")
        return graph.state_dir
