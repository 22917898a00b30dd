"""Writes the graph that serves what other tools' files start, for the GPUs of this machine."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.config.engine_args.arguments import arguments, refusal, shapes_response
from pdserve.convert.servers import Server

_FRONTEND = {"host": "host", "port": "port", "allowed-origins": "allowed-origins"}
_TLS = {"ssl-certfile": "tls-certificate", "ssl-keyfile": "tls-key"}
_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")
_GPU_ONLY = (*_PARALLEL, "gpu-memory-utilization", "cpu-offload-gb", "nnodes", "distributed-executor-backend")
_GPU_QUANTIZATION = ("bitsandbytes", "modelopt", "modelopt_fp4")
_SET_BY_PDSERVE = "is set by pdserve itself."


@dataclass
class Graph:
    sections: dict[str, dict[str, Any]]
    dropped: dict[str, str] = field(default_factory=dict)
    """what was left out -> why, as the end of a sentence that begins with it"""
    keys: list[str] = field(default_factory=list)
    """API keys, for a file beside the graph"""


def graph_for(servers: Sequence[Server], gpus: int) -> Graph:
    """One server is split over the GPUs: half of its copies prefill, where there is room for two. A graph of several
    keeps its roles and numbers. `gpus`: of the machine; 0: the graph is for its CPU."""
    graph = Graph({name: {} for name in ("Common", "Frontend", "VllmWorker", "PrefillWorker", "Security")})
    _place_frontends([server for server in servers if server.role == "frontend"], graph)
    engines = [server for server in servers if server.role != "frontend"]
    prefill = [server for server in engines if server.role == "prefill"]
    decode = [server for server in engines if server.role != "prefill"]
    is_whole = not prefill or not decode  # of a graph's workers, those of one role say how the others are
    parts = [_merged(group, graph) for group in (decode, prefill) if group]
    for server in parts:
        _place_arguments(server, graph, gpus)
    counts = parts[0].count, parts[-1].count * (not is_whole)
    if is_whole and parts[0].count == 1:
        counts = _split(parts[0], gpus)
    _write_workers(graph, parts, counts)
    _protect(graph)
    graph.sections = {name: section for name, section in graph.sections.items() if section}
    return graph


def _merged(servers: Sequence[Server], graph: Graph) -> Server:
    """The first, with the copies of all that are like it. The others are left out."""
    first, *others = servers
    for number, other in enumerate(others, 2):
        if _compared(first) == _compared(other):
            is_part = other.args.keys() & {"data-parallel-rank", "data-parallel-start-rank", "node-rank"}
            first.count += 0 if is_part else other.count
        else:
            name = f"server {number} ({other.args.get('model', 'without a model')})"
            graph.dropped[name] = (
                "has other arguments than the first: give its command alone for a graph of its own."
            )
    return first


def _compared(server: Server) -> dict[str, Any]:
    apart = ("port", "host", "headless", "node-rank", "kv-transfer-config", "served-model-name")
    args = server.args.items()
    return {
        name: value for name, value in args if name not in apart and not name.startswith("data-parallel-")
    } | {"data-parallel-size": server.args.get("data-parallel-size", 1)}


def _place_frontends(frontends: Sequence[Server], graph: Graph) -> None:
    for server in frontends:
        graph.dropped |= server.dropped
        if "port" in server.args:
            graph.sections["Frontend"]["port"] = server.args["port"]
        if (mode := server.args.get("router")) is not None:
            graph.sections.setdefault("Processor", {})["router"] = "kv" if mode == "kv" else "round-robin"


def _count_of(value: object) -> int:
    return int(value) if str(value).isdecimal() and int(value) else 1  # type: ignore[call-overload]


def _split(server: Server, gpus: int) -> tuple[int, int]:
    """Decode and prefill workers."""
    parallel = [_count_of(server.args.get(name, 1)) for name in _PARALLEL]
    if parallel[1] > 1:  # KV of stages cannot move
        return max(1, gpus // (parallel[0] * parallel[1])), 0
    workers = gpus // (parallel[0] * parallel[2]) if gpus else 2
    return max(1, workers - workers // 2), workers // 2


def _place_arguments(server: Server, graph: Graph, gpus: int) -> None:
    """Take out of the server's arguments what belongs to other sections, or nowhere."""
    graph.dropped |= server.dropped
    args, frontend, security = server.args, graph.sections["Frontend"], graph.sections["Security"]
    for name in list(args):
        if name == "served-model-name":
            first, *others = args.pop(name) or [""]
            frontend |= {"served-model-name": first} if first else {}
            if others:
                graph.dropped[name] = f"of {', '.join(others)}: a model has one name here."
        elif name == "api-key":
            keys = args.pop(name)
            given = [
                str(key) for key in keys if isinstance(key, str | int) and not isinstance(key, bool) and key
            ]
            graph.keys += [key for key in given if key.isprintable() and " " not in key]
            if not graph.keys or graph.keys != given:
                graph.dropped[name] = "has no value, or one with a space: set Security.api-keys."
        elif name == "hf-token":
            args.pop(name)
            graph.dropped[name] = (
                "is secret, and others read the graph: set HF_TOKEN in the environment of `serve`."
            )
        elif name in _FRONTEND:
            if (value := args.pop(name)) not in (None, "", ["*"]) or name == "allowed-origins":
                frontend[_FRONTEND[name]] = value
        elif name in _TLS:
            security[_TLS[name]] = args.pop(name)
        elif name == "data-parallel-size":
            server.count *= _count_of(value := args.pop(name))
            if server.count > 1 and args.get("enable-expert-parallel"):
                graph.dropped[name] = (
                    f"{value}: each worker has all experts here; see by `plan` whether they fit."
                )
        elif name == "kv-transfer-config":
            args.pop(name)
            graph.dropped[name] = _SET_BY_PDSERVE
        elif reason := refusal(name) or (_no_gpu(name, args[name]) if not gpus else None):
            value = args.pop(name)
            graph.dropped |= {} if value == 1 and name in _PARALLEL else {name: reason}
    if len(adapters := args.get("lora-modules", [])) > 1:  # they are read once
        args.setdefault("max-cpu-loras", len(adapters))


def _no_gpu(name: str, value: object) -> str | None:
    if name in _GPU_ONLY or (name == "quantization" and value in _GPU_QUANTIZATION):
        return "is for GPUs, and this machine has none: `init --gpu` writes a graph for two."
    return None


def _write_workers(graph: Graph, parts: Sequence[Server], counts: tuple[int, int]) -> None:
    decode, prefill = parts[0], parts[-1]
    common, sections = graph.sections["Common"], graph.sections
    engine = {
        name: value
        for name, value in decode.args.items()
        if not shapes_response(name) or name == "lora-modules"
    }
    common |= {name: value for name, value in engine.items() if prefill.args.get(name) == value}
    for name, server, count in (("VllmWorker", decode, counts[0]), ("PrefillWorker", prefill, counts[1])):
        if not count:
            continue
        own = {key: value for key, value in server.args.items() if key not in common}
        if name == "PrefillWorker":
            own = {
                key: value
                for key, value in own.items()
                if arguments()[key].group != "api" and key in prefill.args
            }
            own = {key: value for key, value in own.items() if not shapes_response(key)}
        elif counts[1]:
            sections[name]["remote-prefill"] = True
        sections[name] |= own | {"ServiceArgs": {"workers": count}, "common-configs": list(common)}
    sections["Frontend"].setdefault("port", 8000)


def _protect(graph: Graph) -> None:
    """Reach as far as the server did: what it had open is accepted by name."""
    frontend, security = graph.sections["Frontend"], graph.sections["Security"]
    if str(frontend.get("host", "127.0.0.1")) in ("127.0.0.1", "localhost", "::1"):
        return
    allow = [] if graph.keys else ["no-keys"]
    if "tls-certificate" not in security:
        allow.append("plain-http")
    if allow:
        security["allow"] = allow


# text


def as_yaml(graph: Graph, header: Iterable[str]) -> str:
    lines = [f"# {line}".rstrip() for line in header]
    if graph.dropped:
        lines += ["#", "# Left out:"]
        lines += [f"#   {name} {reason}" for name, reason in sorted(graph.dropped.items())]
    for name, section in graph.sections.items():
        lines += ["", f"{name}:", *_lines(section, "  ")]
    return "\n".join(lines) + "\n"


def _lines(section: Mapping[str, Any], indent: str) -> Iterable[str]:
    for key, value in section.items():
        if isinstance(value, dict) and key == "ServiceArgs":
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        elif key == "common-configs":
            yield f"{indent}{key}: [{', '.join(value)}]"
        else:
            yield f"{indent}{key}: {_scalar(value)}"


def _scalar(value: object) -> str:
    """JSON is YAML; a plain word needs no quotes."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w./-]*", value) and not _is_word(value):
        return value
    return json.dumps(value, default=str)


def _is_word(value: str) -> bool:
    """Whether YAML would read another value than a text."""
    return value.lower() in ("true", "false", "yes", "no", "on", "off", "null", "y", "n")


def keys_file(graph: Graph, path: Path) -> str:
    """The text of the file of API keys, which the graph then names. A key that is too short stays, with a warning when
    the graph starts."""
    graph.sections.setdefault("Security", {})["api-keys"] = path.name
    names = [f"client-{number}" for number, _ in enumerate(graph.keys, 1)]
    return "".join(f"{name}={key}\n" for name, key in zip(names, graph.keys, strict=True))
