"""`pdserve plan`."""

import json
from typing import Annotated

import typer

from pdserve.cli.options import DemoFile
from pdserve.contract.records import Role
from pdserve.demo import FILE

_UNKNOWN = 3
"""exit code if it is unknown whether the graph fits"""


def plan(
    file: DemoFile = FILE,
    gpus: Annotated[
        str | None, typer.Option(metavar="NxKIND", help="plan for other GPUs: 4xA10, 2x24GiB, 0 for none")
    ] = None,
    role: Annotated[
        Role | None, typer.Option(help="only one process of this role, as on its own host or in its own pod")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="explain how pdserve serves a model of this kind")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the plan as one JSON object")] = False,
) -> int:
    """Show what would run where on this machine: GPUs, memory, KV capacity, concurrent requests, ports, and every vLLM
    argument with its origin. Without --gpus also show what blocks it now: busy ports, a full disk. Reads the model's
    config.json and safetensors headers or index; loads no weights and starts nothing. Exit code 0 if the graph fits, 2
    with the reasons if `pdserve serve` would refuse it, 3 if it is unknown.

    examples:
      pdserve plan -f graph.yaml
      pdserve plan -f graph.yaml --gpus 4xA10      on a machine that you do not have
      pdserve plan --explain                       how the model's KV is kept and moved, and by which ranks
      pdserve plan --json | jq .workers
    """
    from dataclasses import replace

    from pdserve.config.load import load
    from pdserve.observe.tables import show
    from pdserve.plan.machine import Machine, what_if
    from pdserve.plan.plan import make_plan
    from pdserve.plan.render import plan_as_dict, render
    from pdserve.supervisor.preflight import refusals
    from pdserve.util.errors import ConfigError

    machine = Machine.detect()
    machine = what_if(gpus, machine) if gpus else machine
    if role is None:
        found = make_plan(load(file), machine)
    elif not (found := make_plan(load(file), machine, roles={role}, index=0)).slots:
        raise ConfigError([f"{file} has no {role.value}: name another --role."])
    if not machine.imagined:
        now = (text for _, text in refusals(found.config, found.slots))
        found = replace(found, problems=(*found.problems, *now))
    if as_json:
        print(json.dumps(plan_as_dict(found), indent=2))
    else:
        show(render(found, explain=explain))
    return {True: 0, False: 2, None: _UNKNOWN}[found.fits]
