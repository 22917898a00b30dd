"""`pdserve init`."""

import os
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.setup.deploy import example, examples
from pdserve.cli.setup.install import Gpu
from pdserve.config.load import load
from pdserve.convert.servers import graph_in, servers_of
from pdserve.convert.writer import Graph, as_yaml, keys_file
from pdserve.convert.writer import graph_for as converted
from pdserve.demo import FILE
from pdserve.plan.machine import Machine, in_gib
from pdserve.util.errors import ConfigError
from pdserve.util.program import pdserve_command

Source = Annotated[
    str | None,
    typer.Option("--from", metavar="SOURCE", help="a file that starts vLLM, or its command line after `--`"),
]


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]")] = Path("graph.yaml"),
    source: Source = None,
    named: Annotated[
        str | None,
        typer.Option("--example", metavar="NAME", help="an example as it is; `--example list` shows all"),
    ] = None,
    gpu: Gpu = None,
) -> int:
    """Write a graph for this machine into FILE, a YAML with comments, with the bundled demo model. Half of the GPUs
    prefill, the others decode. A single GPU does both, without remote prefill. Without GPUs, one worker of each kind
    runs on the CPU. With --gpu on a machine without GPUs, the graph is for two GPUs.

    With --from, the graph serves the same as SOURCE: a YAML of `vllm serve --config`, a shell script or a manifest with
    `vllm serve` (Kubernetes, Compose), a DynamoGraphDeployment, or a command after `--`. Arguments that the graph
    cannot have are listed with the reason.

    examples:
      pdserve init graph.yaml
      pdserve init graph.yaml --from vllm.yaml
      pdserve init graph.yaml --from -- vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2
      pdserve init graph.yaml --example disagg    one of the examples: agg, both, disagg, hosts, local, secure
      pdserve plan -f graph.yaml
    """
    if named == "list":
        print(examples())
        return 0
    if named is not None:
        _write(file, example(named, file))
        print(f"Wrote {file}. Then: {pdserve_command(f'plan -f {file}')}")
        return 0
    machine = Machine.detect()
    gpus = 0 if gpu is False else len(machine.gpus) or (2 if gpu else 0)
    kinds = ", ".join(sorted({f"{each.name} ({in_gib(each.memory)})" for each in machine.gpus}))
    what = (
        f"{machine.cores} cores, {in_gib(machine.memory)} of RAM, {len(machine.gpus)} GPUs {kinds}".rstrip()
    )
    if source is not None:
        return _convert(source, file, gpus, what)
    _write(file, graph_for(gpus, file, what))
    print(f"Wrote {file}. Set your model in it, then: {pdserve_command(f'serve -f {file}')}")
    return 0


def _convert(source: str, file: Path, gpus: int, machine: str) -> int:
    sections = graph_in(source)
    graph = Graph(sections) if sections else converted(servers_of(source), gpus)
    keys, named = file.with_suffix(".keys"), shlex.quote(str(file))
    secret = keys_file(graph, keys) if graph.keys else ""
    # a command line may have an API key
    shown = source if Path(source).is_file() else source.split()[0] + " ..."
    header = [f"Made by `pdserve init --from` of {shown}, for {machine}.", f"  pdserve serve -f {named}"]
    _write(file, as_yaml(graph, header))
    print(f"Wrote {file}.")
    if secret:
        _write(keys, secret, mode=0o600)
        print(f"Wrote {keys} with the API key{'s' * (len(graph.keys) > 1)}: only you can read it.")
    for name, reason in sorted(graph.dropped.items()):
        print(f"Left out: {name} {reason}")
    try:
        load(file, os.environ)
    except ConfigError as error:
        print("Correct these before you serve it:")
        for problem in error.problems:
            print(f"  {problem}")
        return 1
    print(f"Then: {pdserve_command(f'plan -f {named}')}, and {pdserve_command(f'serve -f {named}')}")
    return 0


def _write(file: Path, text: str, mode: int = 0o644) -> None:
    try:
        with open(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "w") as new:
            new.write(text)
    except FileExistsError:
        raise ConfigError([f"{file} exists: choose another name, or remove it first."]) from None
    except OSError as error:
        raise ConfigError([f"{file} cannot be written: {error.strerror or error}."]) from error


def graph_for(gpus: int, file: Path, machine: str) -> str:
    """Return the demo model's graph for this number of GPUs."""
    text = FILE.read_text().partition("\n\n")[2]
    if gpus == 1:  # no second GPU to prefill
        decode = text.partition("\nPrefillWorker:")[0]
        text = re.sub(
            r"remote-prefill: true.*?(?=  max-num-seqs)", "remote-prefill: false\n", decode, flags=re.S
        )
    elif gpus:
        workers = iter((gpus - gpus // 2, gpus // 2))
        text = re.sub(r"workers: 1", lambda _: f"workers: {next(workers)} # a GPU each", text)
    return (
        f"# A graph for this machine: {machine}.\n#   pdserve plan -f {file}\n#   pdserve serve -f {file}\n"
        f"# `serve` starts NATS and etcd, because the file names none.\n\n{text}"
    )
