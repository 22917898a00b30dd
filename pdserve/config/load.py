"""YAML to Config: strict, with every problem of a file found in one go.

Sections are those of a Dynamo 0.2 graph: Common, Frontend, Processor, VllmWorker, PrefillWorker; and Graph,
which is ours: namespace, nats, etcd, state-dir, host, kv-port, request-timeout, drain-timeout. As in Dynamo,
a key of Common counts only in the sections that list it in `common-configs`, and not where the section sets
it itself; one that nobody lists is an error. The environment wins over Graph: PDSERVE_NATS, PDSERVE_ETCD,
PDSERVE_STATE_DIR.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdserve.config import places
from pdserve.config.agreement import compare_workers, merge_processor
from pdserve.config.common import Common
from pdserve.config.findings import Findings, or_nearest
from pdserve.config.keys import Keys
from pdserve.config.schema import (
    POLICIES,
    AdmissionLimits,
    Config,
    DecodeConfig,
    FrontendConfig,
    PrefillConfig,
    WorkerConfig,
)
from pdserve.config.tree import Entry, read_tree
from pdserve.config.workers import Arguments, read_arguments, read_decode, read_prefill

SECTIONS = ("Common", "Graph", "Frontend", "Processor", "VllmWorker", "PrefillWorker")


def load(path: Path, env: Mapping[str, str] = os.environ) -> Config:
    """Reads the file; whether this machine can run it is the plan's question. Raises ConfigError."""
    findings = Findings(path)
    tree = read_tree(path, findings)
    _check_sections(tree, findings)
    common = Common(tree.get("Common"), findings)
    frontend, name = _frontend(tree.get("Frontend"), findings)
    router, processes, asked = _processor(tree.get("Processor"), common, findings)
    decode, prefill, model = _workers(tree, common, asked, findings)
    common.check_unused()
    graph = _graph(tree.get("Graph"), env, findings)
    findings.raise_if_any()
    if frontend is not None:
        frontend = replace(frontend, router=router, processes=max(frontend.processes, processes))
    return Config(
        path=path,
        model=places.resolve_model(model, path.parent),
        served_model_name=name or Path(model).name,
        frontend=frontend,
        decode=decode,
        prefill=prefill,
        notes=tuple(findings.notes),
        **graph,
    )


def _check_sections(tree: Mapping[str, Entry], findings: Findings) -> None:
    for name, entry in tree.items():
        if name not in SECTIONS:
            otherwise = f"remove it, or use one of: {', '.join(SECTIONS)}."
            findings.problem(
                entry.line, entry.path, f"is not a section: {or_nearest(name, SECTIONS, otherwise)}"
            )


def _frontend(entry: Entry | None, findings: Findings) -> tuple[FrontendConfig | None, str]:
    """The served model name is empty where the file does not say."""
    if entry is None:
        return None, ""
    keys = Keys.of(entry, "Frontend", findings)
    if endpoint := keys.take("endpoint"):
        text = f"{endpoint.path} has no meaning here: the frontend finds its workers in etcd."
        findings.note(endpoint.line, text)
    config = FrontendConfig(
        host=keys.text("host", FrontendConfig.host, places.wrong_host),
        port=keys.integer("port", FrontendConfig.port, 1, 65535),
        processes=_processes(keys),
        header_timeout=keys.seconds("header-timeout", FrontendConfig.header_timeout),
        write_timeout=keys.seconds("write-timeout", FrontendConfig.write_timeout),
        max_request_timeout=keys.seconds("max-request-timeout", FrontendConfig.max_request_timeout),
        limits=AdmissionLimits(
            max_wait=keys.seconds("max-wait", AdmissionLimits.max_wait),
            max_waiting=keys.integer("max-waiting", AdmissionLimits.max_waiting, 1),
            max_waiting_tokens=keys.integer("max-waiting-tokens", AdmissionLimits.max_waiting_tokens, 1),
            max_outputs=keys.integer("max-outputs", AdmissionLimits.max_outputs, 1),
        ),
    )
    name = keys.text("served-model-name", "")
    keys.done()
    return config, name


def _processor(entry: Entry | None, common: Common, findings: Findings) -> tuple[str, int, Arguments]:
    keys = Keys.of(entry, "Processor", findings)
    common.pull_into(keys, entry)
    keys.take("common-configs")
    router = keys.choice("router", "round-robin", POLICIES)
    processes = _processes(keys)
    return router, processes, read_arguments(keys, keys.rest())


def _processes(keys: Keys) -> int:
    service = keys.inside("ServiceArgs")
    workers: int = service.integer("workers", 1, 1)
    resources = service.inside("resources")
    resources.integer("gpu", 0, 0, 0)
    resources.done()
    service.done()
    return workers


def _workers(
    tree: Mapping[str, Entry], common: Common, asked: Arguments, findings: Findings
) -> tuple[DecodeConfig | None, PrefillConfig | None, str]:
    """Both kinds of workers and the model that they have in common; `asked` are the Processor's arguments."""
    decode, prefill = None, None
    decode_args, prefill_args = Arguments(), Arguments()
    if entry := tree.get("VllmWorker"):
        decode, decode_args = read_decode(common.pull_into(Keys.of(entry, "VllmWorker", findings), entry))
        _check_model(entry, decode_args, findings)
    if entry := tree.get("PrefillWorker"):
        prefill, prefill_args = read_prefill(
            common.pull_into(Keys.of(entry, "PrefillWorker", findings), entry)
        )
        _check_model(entry, prefill_args, findings)
    merge_processor(asked, decode_args if decode else prefill_args, findings)
    _check_split(tree, decode, prefill, findings)
    if decode and prefill:
        compare_workers(decode_args, prefill_args, findings)
    if decode is not None:
        decode = replace(decode, **_with_processor(decode, decode_args))
    return decode, prefill, str(decode_args.values.get("model") or prefill_args.values.get("model") or "")


def _with_processor(worker: WorkerConfig, args: Arguments) -> dict[str, Any]:
    values = args.without("model")
    return {"engine_args": values, "origins": {name: args.entries[name].section for name in values}}


def _check_model(section: Entry, args: Arguments, findings: Findings) -> None:
    model = args.values.get("model")
    if model is None:
        text = "has no model: set it in Common (demo, a folder or a hub id) and list it in common-configs."
        findings.problem(section.line, section.path, text)
    elif wrong := places.wrong_model(str(model), findings.path.parent):
        findings.problem(args.entries["model"].line, args.entries["model"].path, wrong)


def _check_split(
    tree: Mapping[str, Entry], decode: DecodeConfig | None, prefill: PrefillConfig | None, findings: Findings
) -> None:
    if decode is None and prefill is None:
        findings.problem(0, "", "there is no VllmWorker section: add one, as in configs/local.yaml.")
    if decode is not None and decode.remote_prefill and prefill is None:
        at = tree["VllmWorker"].children["remote-prefill"]
        text = "is true, but there is no PrefillWorker section: add one, or set it to false."
        findings.problem(at.line, at.path, text)
    if decode is not None and prefill is not None and not decode.remote_prefill:
        said = tree["VllmWorker"].children.get("remote-prefill")
        if said is not None and said.value is not False:
            return  # it is a problem of its own already
        at = tree["PrefillWorker"]
        text = "would never get work: set remote-prefill: true in VllmWorker, or remove this section."
        findings.problem(at.line, at.path, text)


def _graph(entry: Entry | None, env: Mapping[str, str], findings: Findings) -> dict[str, Any]:
    keys = Keys.of(entry, "Graph", findings)
    nats, etcd = keys.text("nats", None, places.wrong_nats), keys.text("etcd", None, places.wrong_etcd)
    state = places.folder(keys.text("state-dir", str(Config.state_dir)), findings.path.parent)
    graph = {
        "namespace": keys.text("namespace", Config.namespace, places.wrong_namespace),
        "host": keys.text("host", Config.host, places.wrong_host),
        "kv_port": keys.integer("kv-port", Config.kv_port, 1, 65535),
        "request_timeout": keys.seconds("request-timeout", Config.request_timeout),
        "drain_timeout": keys.seconds("drain-timeout", Config.drain_timeout, zero=True),
    }
    keys.done()
    nats = places.from_env("PDSERVE_NATS", env, places.wrong_nats, findings) or nats
    etcd = places.from_env("PDSERVE_ETCD", env, places.wrong_etcd, findings) or etcd
    if env.get("PDSERVE_STATE_DIR"):
        state = places.folder(env["PDSERVE_STATE_DIR"], Path.cwd())
    return {**graph, "nats": nats, "etcd": etcd and places.plain_etcd(etcd), "state_dir": state}
