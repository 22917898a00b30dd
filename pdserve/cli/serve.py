"""`pdserve serve`."""

import argparse

from pdserve.cli.options import Commands, add_file, add_logging, command, load_plan

_TEXT = """\
Run the whole graph of FILE on this machine until Ctrl-C: a NATS and an etcd where the file names none,
frontends, decode workers and prefill workers. What cannot work is said before anything starts (exit code 2).
A process that crashes is started again, for ever, and `pdserve status` and /health say which; only where none of its
kind was ever ready, everything is stopped with the cause (exit code 1, or 2 for a wrong configuration).
"""
_EXAMPLES = """\
  pdserve serve -f configs/local.yaml               on the CPU, with the bundled demo model
  pdserve serve -f configs/disagg.yaml              two workers on two GPUs each
  pdserve serve -f configs/local.yaml --log-format json 2> pdserve.jsonl
"""


def add(commands: Commands) -> None:
    parser = command(commands, "serve", "run the whole graph on this machine", _TEXT, _EXAMPLES)
    add_file(parser)
    add_logging(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    plan = load_plan(args)
    from pdserve.supervisor.serve import serve

    return serve(plan, args.log_format, args.verbose)
