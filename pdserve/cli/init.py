"""`pdserve init`."""

import re
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.install import Gpu
from pdserve.command import command
from pdserve.demo import FILE
from pdserve.errors import ConfigError
from pdserve.plan.machine import Machine, in_gib


def init(file: Annotated[Path, typer.Argument(metavar="FILE")], gpu: Gpu = None) -> int:
    """Write a graph for this machine into FILE, a YAML with comments, with the bundled demo model: half of the GPUs
    prefill, the others decode; one GPU does both, without separation; without GPUs one worker of each kind runs on the
    CPU. With --gpu where there are none, it is for two.

    examples:
      pdserve init graph.yaml
      pdserve plan -f graph.yaml
    """
    machine = Machine.detect()
    gpus = 0 if gpu is False else len(machine.gpus) or (2 if gpu else 0)
    kinds = ", ".join(sorted({f"{each.name} ({in_gib(each.memory)})" for each in machine.gpus}))
    had = f"{machine.cores} cores, {in_gib(machine.memory)} of RAM, {len(machine.gpus)} GPUs {kinds}".rstrip()
    try:
        with file.open("x") as new:
            new.write(graph_for(gpus, file, had))
    except FileExistsError:
        raise ConfigError([f"{file} exists: choose another name, or remove it first."]) from None
    except OSError as error:
        raise ConfigError([f"{file} cannot be written: {error.strerror or error}."]) from error
    print(f"Wrote {file}. Set your model in it, then: {command(f'serve -f {file}')}")
    return 0


def graph_for(gpus: int, file: Path, machine: str) -> str:
    """The demo's graph, for so many GPUs."""
    text = FILE.read_text().partition("\n\n")[2]
    if gpus == 1:  # nothing to separate
        decode = text.partition("\nPrefillWorker:")[0]
        text = re.sub(
            r"remote-prefill: true.*?(?=  max-num-seqs)", "remote-prefill: false\n", decode, flags=re.S
        )
    elif gpus:
        workers = iter((gpus - gpus // 2, gpus // 2))
        text = re.sub(r"workers: 1", lambda _: f"workers: {next(workers)} # a GPU each", text)
    return (
        f"# A graph for this machine: {machine}.\n#   pdserve plan -f {file}\n#   pdserve serve -f {file}\n"
        f"# `serve` starts NATS and etcd, since the file names none.\n\n{text}"
    )
