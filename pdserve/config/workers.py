"""Worker sections: how many, on which GPUs, and vLLM's arguments, each checked and with its origin."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pdserve.config import owned
from pdserve.config.arguments import arguments, canonical, parse
from pdserve.config.findings import Findings
from pdserve.config.keys import Keys
from pdserve.config.schema import ENGINES, DecodeConfig, PrefillConfig, WorkerConfig
from pdserve.config.tree import Entry

_CONNECTORS = ("DynamoNixlConnector", "NixlConnector")


@dataclass
class Arguments:
    """vLLM arguments of one section by canonical name, and where each was written."""

    values: dict[str, object] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)

    def put(self, name: str, value: object, entry: Entry) -> None:
        self.values[name] = value
        self.entries[name] = entry

    def without(self, *names: str) -> dict[str, object]:
        return {name: value for name, value in self.values.items() if name not in names}


def read_decode(keys: Keys) -> tuple[DecodeConfig, Arguments]:
    own = DecodeConfig(
        remote_prefill=keys.flag("remote-prefill", False),
        conditional_disagg=keys.flag("conditional-disagg", True),
        max_local_prefill_length=keys.integer("max-local-prefill-length", 512, 0),
        max_prefill_queue_size=keys.integer("max-prefill-queue-size", 10, 0),
    )
    worker, args = read_worker(keys)
    return (replace(own, **vars(worker)), args)


def read_prefill(keys: Keys) -> tuple[PrefillConfig, Arguments]:
    worker, args = read_worker(keys)
    for name, entry in args.entries.items():
        if arguments()[name].group == "api":
            text = "shapes answers, which prefill workers do not give: move it to Processor."
            keys.findings.problem(entry.line, entry.path, text)
    return PrefillConfig(**vars(worker)), args


def read_worker(keys: Keys) -> tuple[WorkerConfig, Arguments]:
    """What both kinds have. The model's name is among the arguments returned, not among `engine_args`."""
    keys.take("common-configs")
    engine = keys.choice("engine", "vllm", ENGINES)
    service = keys.inside("ServiceArgs")
    count = service.integer("workers", 1, 1)
    resources = service.inside("resources")
    service.done()
    args = read_arguments(keys, keys.rest())
    values = args.without("model")
    origins = {name: args.entries[name].section for name in values}
    worker = WorkerConfig(count=count, engine=engine, engine_args=values, origins=origins)
    return _with_gpus(worker, resources), args


def read_arguments(keys: Keys, entries: Iterable[Entry]) -> Arguments:
    args = Arguments()
    for entry in entries:
        name = canonical(entry.path.rsplit(".", 1)[-1].replace("_", "-"))
        if name is None:
            keys.unknown(entry, tuple(arguments()), beside=" nor a vLLM argument")
        elif name == "kv-transfer-config":
            _read_connector(entry, keys.findings)
        elif reason := owned.reason(name):
            keys.findings.problem(entry.line, entry.path, reason)
        elif name in args.values:
            other = args.entries[name]
            text = f"is the same vLLM argument as {other.path} in line {other.line}: keep one of the two."
            keys.findings.problem(entry.line, entry.path, text)
        else:
            _read_argument(name, entry, args, keys.findings)
    return args


def _read_argument(name: str, entry: Entry, args: Arguments, findings: Findings) -> None:
    try:
        args.put(name, parse(name, entry.value), entry)
    except ValueError as error:
        findings.problem(entry.line, entry.path, str(error))


def _read_connector(entry: Entry, findings: Findings) -> None:
    """The one form of kv-transfer-config that may stay in a file: it asks for what pdserve does anyway."""
    try:
        config = json.loads(entry.value) if isinstance(entry.value, str) else entry.value
    except ValueError as error:
        findings.problem(entry.line, entry.path, f"is not JSON ({error}): remove it, pdserve sets it.")
        return
    config = config if isinstance(config, dict) else {}
    connector = config.get("kv_connector")
    if connector not in _CONNECTORS:
        text = "is set by pdserve, which moves KV blocks with its own NIXL connector over UCX: remove it."
        findings.problem(entry.line, entry.path, text)
    elif extra := sorted(set(config) - {"kv_connector", "kv_role"}):
        text = f"sets {', '.join(extra)}, which pdserve sets itself (role, lease, recompute): remove it."
        findings.problem(entry.line, entry.path, text)
    else:
        note = f"{entry.path}: {connector} means pdserve's own NIXL connector, with the roles of this graph."
        findings.note(entry.line, note)


def _with_gpus(worker: WorkerConfig, resources: Keys) -> WorkerConfig:
    """`gpu` and the engine's ranks must say the same: vLLM puts each rank on a GPU of its own."""
    findings, ids, gpu = resources.findings, resources.take("gpu-ids"), resources.take("gpu")
    resources.done()
    gpu_ids = _gpu_ids(ids, worker, findings)
    if gpu is None:
        return replace(worker, gpus=worker.ranks if gpu_ids else None, gpu_ids=gpu_ids)
    gpus = int(gpu.value) if isinstance(gpu.value, str) and gpu.value.isdecimal() else gpu.value
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 0:
        findings.problem(gpu.line, gpu.path, f"is {gpu.value!r}, but must be a whole number, 0 or more.")
        return worker
    if worker.engine == "vllm" and gpus not in (0, worker.ranks):
        text = (
            f"is {gpus}, but tensor-parallel-size x pipeline-parallel-size makes {worker.ranks}, one for "
            f"each GPU: set tensor-parallel-size: {gpus} or gpu: {worker.ranks}."
        )
        findings.problem(gpu.line, gpu.path, text)
    if gpu_ids and gpus == 0:
        findings.problem(gpu.line, gpu.path, "is 0, but gpu-ids names GPUs: keep one of the two.")
    return replace(worker, gpus=gpus, gpu_ids=gpu_ids)


def _gpu_ids(entry: Entry | None, worker: WorkerConfig, findings: Findings) -> tuple[int, ...]:
    if entry is None:
        return ()
    ids = entry.value
    if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
        findings.problem(entry.line, entry.path, "must be a list of GPU numbers, as in [0, 1].")
        return ()
    needed = worker.count * worker.ranks
    if len(ids) != needed:
        text = (
            f"names {len(ids)} GPUs, but {worker.count} x {worker.ranks} ranks need {needed}: name {needed}."
        )
        findings.problem(entry.line, entry.path, text)
        return ()
    return tuple(ids)
