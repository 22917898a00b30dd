"""`pdserve set`."""

import argparse

from pdserve.cli.options import Commands, add_graph, command

_TEXT = """\
Change settings of a running graph, at once and without a restart. They are kept in etcd and win over the file
until unset. Without arguments: show them.
"""
_EXAMPLES = """\
  pdserve set                                   what can be set, and what is
  pdserve set max-local-prefill-length=256      longer prompts go to a prefill worker
  pdserve set router=least-loaded max-prefill-queue-size=4
  pdserve set --unset router                    back to the file's
"""


def add(commands: Commands) -> None:
    parser = command(commands, "set", "change a running graph's settings", _TEXT, _EXAMPLES)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    parser.add_argument(
        "--unset", action="append", default=[], metavar="KEY", help="back to the file's value"
    )
    add_graph(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import asyncio

    from pdserve.cli.status import settings
    from pdserve.cli.status.find import find

    changes = settings.parse(args.changes, args.unset)
    settings.check(changes)
    found = asyncio.run(settings.change(find(args.file, args.etcd, args.namespace), changes))
    for name, what in settings.SETTINGS.items():
        print(f"{name} = {found.get(name, '(as in the file)')}   # {what}")
    return 0
