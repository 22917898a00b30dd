"""Writes a graph with the servers of another tool's file (`servers.py`), for the GPUs of this machine."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.config.engine_args.arguments import refusal, shapes_response
from pdserve.convert.servers import Server

_SECTIONS = ("Common", "Frontend", "VllmWorker", "PrefillWorker", "Security")
_OTHER_SECTION = {
    "host": ("Frontend", "host"),
    "port": ("Frontend", "port"),
    "allowed-origins": ("Frontend", "allowed-origins"),
    "ssl-certfile": ("Security", "tls-certificate"),
    "ssl-keyfile": ("Security", "tls-key"),
}
"""vLLM argument -> the section and key that replace it."""
_LEFT_OUT = {
    "hf-token": "is secret, and others read the graph: set HF_TOKEN in the environment of `serve`.",
    "kv-transfer-config": "is set by pdserve itself.",
}
_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")
_GPU_ONLY = (*_PARALLEL, "gpu-memory-utilization", "cpu-offload-gb", "nnodes", "distributed-executor-backend")
_GPU_QUANTIZATION = ("bitsandbytes", "modelopt", "modelopt_fp4")


@dataclass
class Graph:
    sections: dict[str, dict[str, Any]]
    dropped: dict[str, str] = field(default_factory=dict)
    """An argument or server that is left out -> the reason, as the end of a sentence that begins with it."""
    keys: list[str] = field(default_factory=list)
    """API keys, for a separate file."""


def graph_for(servers: Sequence[Server], gpus: int) -> Graph:
    """Return a graph that serves the same as these servers.

    A single server is copied to all GPUs, and half of the copies prefill if there is room for two. Servers that are
    already disaggregated keep their roles and numbers. `gpus`: of this machine; 0: run on the CPU.
    """
    graph = Graph({name: {} for name in _SECTIONS})
    _place_frontends([server for server in servers if server.role == "frontend"], graph)
    engines = [server for server in servers if server.role != "frontend"]
    prefill = [server for server in engines if server.role == "prefill"]
    decode = [server for server in engines if server.role != "prefill"]
    parts = [_merged(group, graph) for group in (decode, prefill) if group]
    for server in parts:
        _place_arguments(server, graph, gpus)
    counts = parts[0].count, parts[1].count if len(parts) > 1 else 0
    if counts == (1, 0):
        counts = _split(parts[0], gpus)
    _write_workers(graph, parts[0], parts[-1], counts)
    _protect(graph)
    graph.sections = {name: section for name, section in graph.sections.items() if section}
    return graph


def _merged(servers: Sequence[Server], graph: Graph) -> Server:
    """Return the first server, with the count of all that are equal to it. Servers with other arguments are dropped."""
    first, *others = servers
    for number, other in enumerate(others, 2):
        if _compared(first) == _compared(other):
            is_part = other.args.keys() & {"data-parallel-rank", "data-parallel-start-rank", "node-rank"}
            first.count += 0 if is_part else other.count
        else:
            name = f"server {number} ({other.args.get('model', 'without a model')})"
            text = "has other arguments than the first: convert its command alone into another graph."
            graph.dropped[name] = text
    return first


def _compared(server: Server) -> dict[str, Any]:
    """Return the arguments that are equal in all copies of a server."""
    differ = ("port", "host", "headless", "node-rank", "kv-transfer-config", "served-model-name")
    copies = {"data-parallel-size": server.args.get("data-parallel-size", 1)}
    return copies | {
        name: value
        for name, value in server.args.items()
        if name not in differ and not name.startswith("data-parallel-")
    }


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
    """Return the numbers of decode and prefill workers."""
    tensor, stages, context = (_count_of(server.args.get(name, 1)) for name in _PARALLEL)
    if stages > 1:  # KV of pipeline stages cannot move
        return max(1, gpus // (tensor * stages)), 0
    workers = gpus // (tensor * context) if gpus else 2
    return max(1, workers - workers // 2), workers // 2


def _place_arguments(server: Server, graph: Graph, gpus: int) -> None:
    """Move arguments that belong to other sections, and drop those that a graph cannot have."""
    graph.dropped |= server.dropped
    for name, value in list(server.args.items()):
        if name in _LEFT_OUT:
            graph.dropped[name] = _LEFT_OUT[name]
        elif name in _OTHER_SECTION:
            section, key = _OTHER_SECTION[name]
            if value not in (None, ""):
                graph.sections[section][key] = value
        elif name in _PLACED_BY:
            _PLACED_BY[name](server, graph, value)
        elif reason := refusal(name) or (_needs_gpu(name, value) if not gpus else None):
            if value != 1 or name not in _PARALLEL:
                graph.dropped[name] = reason
        else:
            continue
        del server.args[name]
    if len(adapters := server.args.get("lora-modules", [])) > 1:  # `load` refuses more adapters than fit
        server.args.setdefault("max-cpu-loras", len(adapters))


def _place_served_name(server: Server, graph: Graph, names: list[Any]) -> None:
    first, *others = names or [""]
    graph.sections["Frontend"] |= {"served-model-name": first} if first else {}
    if others:
        graph.dropped["served-model-name"] = f"of {', '.join(others)}: a model has one name here."


def _place_api_keys(server: Server, graph: Graph, keys: list[Any]) -> None:
    given = [str(key) for key in keys if isinstance(key, str | int) and not isinstance(key, bool) and key]
    valid = [key for key in given if key.isprintable() and " " not in key]
    graph.keys = list(dict.fromkeys([*graph.keys, *valid]))
    if not valid or valid != given:
        graph.dropped["api-key"] = "has no value, or one with a space: set Security.api-keys."


def _place_data_parallel(server: Server, graph: Graph, size: Any) -> None:
    server.count *= _count_of(size)
    if server.count > 1 and server.args.get("enable-expert-parallel"):
        text = f"{size}: each worker has all experts here; check with `plan` whether they fit."
        graph.dropped["data-parallel-size"] = text


_PLACED_BY: dict[str, Callable[[Server, Graph, Any], None]] = {
    "served-model-name": _place_served_name,
    "api-key": _place_api_keys,
    "data-parallel-size": _place_data_parallel,
}


def _needs_gpu(name: str, value: object) -> str | None:
    if name in _GPU_ONLY or (name == "quantization" and value in _GPU_QUANTIZATION):
        return "is for GPUs, and this machine has none: `init --gpu` writes a graph for two."
    return None


def _write_workers(graph: Graph, decode: Server, prefill: Server, counts: tuple[int, int]) -> None:
    common, sections = graph.sections["Common"], graph.sections
    for name, value in decode.args.items():
        if prefill.args.get(name) == value and (not shapes_response(name) or name == "lora-modules"):
            common[name] = value
    for name, server, count in (("VllmWorker", decode, counts[0]), ("PrefillWorker", prefill, counts[1])):
        if count:
            own = {key: value for key, value in server.args.items() if key not in common}
            if name == "PrefillWorker":
                own = {key: value for key, value in own.items() if not shapes_response(key)}
            elif counts[1]:
                sections[name]["remote-prefill"] = True
            sections[name] |= own | {"ServiceArgs": {"workers": count}, "common-configs": list(common)}
    sections["Frontend"].setdefault("port", 8000)


def _protect(graph: Graph) -> None:
    """Allow clients without keys or TLS if the server allowed them."""
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
    """Write a plain word without quotes, and any other value as JSON, which is YAML."""
    other_values = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")  # not texts in YAML
    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z/][\w./-]*", value)
        and value.lower() not in other_values
    ):
        return value
    return json.dumps(value, default=str)


def keys_file(graph: Graph, path: Path) -> str:
    """Set Security.api-keys to the name of `path`, and return that file's text. Short keys stay; frontends warn of
    them."""
    graph.sections.setdefault("Security", {})["api-keys"] = path.name
    return "".join(f"client-{number}={key}\n" for number, key in enumerate(graph.keys, 1))
