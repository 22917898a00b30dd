"""`pdserve plan`."""

import argparse

from pdserve.cli.options import Commands, add_file, command, show

_TEXT = """\
Show what would run where on this machine: GPUs, memory, KV capacity, the most requests at once, ports, every
vLLM argument and where it came from. Reads the model's config.json and safetensors index; loads no weights,
starts nothing. Exit code 0 where the graph fits, else 2 with the reasons.
"""
_EXAMPLES = """\
  pdserve plan -f configs/disagg.yaml
  pdserve plan -f configs/disagg.yaml --gpus 4xA10     on a machine that you do not have
  pdserve plan -f configs/local.yaml --json | jq .workers
"""


def add(commands: Commands) -> None:
    parser = command(commands, "plan", "what would run where, and whether it fits", _TEXT, _EXAMPLES)
    add_file(parser)
    parser.add_argument("--gpus", metavar="NxKIND", help="plan for other GPUs: 4xA10, 2x24GiB, 0 for none")
    parser.add_argument("--json", action="store_true", help="the plan as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pdserve.config.load import load
    from pdserve.plan.machine import Machine, what_if
    from pdserve.plan.plan import make_plan
    from pdserve.plan.render import plan_as_dict, render

    machine = Machine.detect()
    plan = make_plan(load(args.file), what_if(args.gpus, machine) if args.gpus else machine)
    if args.json:
        import json

        print(json.dumps(plan_as_dict(plan), indent=2))
    else:
        show(render(plan))
    return 2 if plan.problems else 0
