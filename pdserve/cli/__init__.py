"""The command line, built with typer.

Each command is a function in its own module: the docstring is the text of `--help`, the annotated parameters are the
options, and the result is the exit code. A module is imported only when its command is
used, so that `pdserve --help` is fast (docs/decisions/0019-command-line.md).
"""

import inspect
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from pdserve import __version__
from pdserve.util.errors import ConfigError, PdserveError, Unavailable

COMMANDS = {
    "install": ("pdserve.cli.setup.install:install", "install the engine into its own environment"),
    "init": ("pdserve.cli.setup.init:init", "write a YAML for this machine"),
    "deploy": ("pdserve.cli.setup.deploy:deploy", "write the Helm chart, Compose files or systemd units"),
    "serve": ("pdserve.cli.run.serve:serve", "run the whole graph on this machine"),
    "frontend": ("pdserve.cli.run.role:role", "run one frontend: the HTTP API of all models"),
    "decode": ("pdserve.cli.run.role:role", "run one decode worker"),
    "prefill": ("pdserve.cli.run.role:role", "run one prefill worker"),
    "both": ("pdserve.cli.run.role:role", "run one worker that decodes and prefills"),
    "plan": ("pdserve.cli.setup.plan:plan", "show what would run where, and whether it fits"),
    "status": ("pdserve.cli.operate.status:status", "show the running processes and their load"),
    "trace": (
        "pdserve.cli.operate.trace:trace",
        "show where a request went, why, and how long each part took",
    ),
    "set": ("pdserve.cli.operate.settings:change_settings", "change a running graph's settings"),
    "credentials": ("pdserve.cli.setup.credentials:make_credentials", "make certificates for several hosts"),
    "doctor": ("pdserve.cli.setup.doctor:doctor", "find what keeps a graph from serving on this host"),
    "chaos": (
        "pdserve_bench.chaos.command:chaos",
        "kill parts of a graph under load, and count lost requests",
    ),
    "bench": (
        {
            "multi-round": (
                "pdserve_bench.multi_round.command:multi_round",
                "conversations of several rounds, with users that join over time",
            ),
            "goodput": (
                "pdserve_bench.goodput.command:goodput",
                "the highest rate at which 90 % of the requests meet an SLO",
            ),
            "replay": (
                "pdserve_bench.replay.command:replay",
                "the requests of a trace at their times, and the server's load over time",
            ),
            "promise": (
                "pdserve_bench.promise.command:promise",
                "the running graph with and without a promise (SLO), in turn",
            ),
        },
        "measure a server, or this graph against one engine",
    ),
    "compare": (
        "pdserve_bench.compare.command:compare",
        "compare this graph and its splits with the best single engine",
    ),
}
"""Name -> the import string of the command's function (for a group, its commands), and one line of help."""
_WITHOUT_ENGINE = ("install", "init", "deploy", "status", "trace", "set", "credentials")

_EPILOG = """\
environment:
  PDSERVE_STATE_DIR                folder for state and logs of `serve`, instead of the file's (default: ~/.pdserve)
  PDSERVE_NATS, PDSERVE_ETCD       servers to use instead of the file's
  PDSERVE_HOST                     address of this host for other hosts, instead of the file's
  PDSERVE_CREDENTIALS              folder of `pdserve credentials`, instead of the file's
  PDSERVE_ENGINE                   folder of the engine of `pdserve install` (default: in ~/.local/share/pdserve)

exit codes: 0 done, 1 failed, 2 wrong configuration or command line. 3: `plan` does not know whether the graph fits;
`status` found a problem.
"""
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
_PLAIN: dict[str, Any] = {"rich_markup_mode": None, "add_completion": False, "context_settings": _SETTINGS}
"""No boxes and no markup: users read help in pipes and logs too, and copy its examples."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `argv`, by default this process's; return the exit code."""
    if argv is None:
        # Python processes that we start must not import from the current folder, which may be another user's. They
        # would with `-m`, `-c` and multiprocessing.
        os.environ["PYTHONSAFEPATH"] = "1"
    words = _with_source(sys.argv[1:] if argv is None else argv)
    try:
        return build_group().main(words, prog_name="pdserve", standalone_mode=False) or 0
    except ConfigError as error:
        _complain(*error.problems)
        return 2
    except PdserveError as error:
        _complain(str(error))
        return 1
    except typer.TyperException as error:  # of the command line
        if context := getattr(error, "ctx", None):
            print(f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n", file=sys.stderr)
        _complain(error.format_message())
        return error.exit_code
    except typer.Abort:  # Ctrl-C at a question
        print(file=sys.stderr)
        return 130


def _with_source(argv: Sequence[str]) -> Sequence[str]:
    """Join the command of `init --from -- COMMAND` into one word, because its options are not pdserve's."""
    for at, pair in enumerate(pairwise(argv)):
        if argv[0] == "init" and pair == ("--from", "--"):
            return [*argv[: at + 1], shlex.join(argv[at + 2 :])]
    return argv


def _complain(*problems: str) -> None:
    for problem in problems:
        print(f"pdserve: {problem}", file=sys.stderr)


def build_group() -> TyperGroup:
    app = typer.Typer(cls=_Group, epilog=_EPILOG, subcommand_metavar="COMMAND ...", **_PLAIN)
    app.callback()(_pdserve)
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    _add(group, COMMANDS)
    return group


def _add(group: TyperGroup, commands: Mapping[str, Any]) -> None:
    for name, (what, line) in commands.items():
        if isinstance(what, str):
            group.add_command(_LazyCommand(name, what, line))
        else:
            app = typer.Typer(
                cls=_Group, help=f"{line[0].upper()}{line[1:]}.", subcommand_metavar="COMMAND ...", **_PLAIN
            )
            app.callback(invoke_without_command=False)(lambda: None)
            inner = get_command(app)
            assert isinstance(inner, TyperGroup)
            inner.name, inner.short_help = name, line
            _add(inner, what)
            group.add_command(inner)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"pdserve {__version__}")
        raise typer.Exit


def _pdserve(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """LLM serving on vLLM with disaggregated prefill and decode.
    One YAML file describes the graph, one command runs it.

      pdserve serve                          serve the bundled demo model on this machine, until Ctrl-C
      pdserve init graph.yaml                write a YAML for this machine
      pdserve plan -f graph.yaml             show what would run where, and whether it fits
      pdserve status                         show the running processes and their load
      pdserve trace ID                       show where a request went, why, and how long each part took
      pdserve doctor -f graph.yaml           find what keeps it from serving on this host
      pdserve chaos -f graph.yaml            kill its processes under load, and count lost requests
      pdserve compare -f graph.yaml          compare it with a single engine
      pdserve bench goodput                  find the highest rate at which a server meets an SLO
    """


class _Verbatim:
    """Show help and examples with their line breaks. In examples, `{command}` becomes the command's name."""

    help: str | None
    epilog: str | None

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"\n{self.help}\n")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"\n{(self.epilog or '').replace('{command}', ctx.info_name)}")


class _Group(_Verbatim, TyperGroup):
    pass


class _Command(_Verbatim, TyperCommand):
    pass


class _LazyCommand(TyperCommand):
    """A command that is imported when it is used. Until then, it is a line in `pdserve --help`."""

    def __init__(self, name: str, function: str, line: str) -> None:
        super().__init__(name, short_help=line)
        self._function = function

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if self.name not in _WITHOUT_ENGINE:
            from pdserve.cli.setup.install import use_engine

            use_engine()
        return self._load().make_context(info_name, args, parent, **extra)

    def _load(self) -> Any:
        """Import the command. Raises Unavailable if a package that `pdserve_bench` needs is not installed."""
        module, _, name = self._function.partition(":")
        try:
            function = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if not module.startswith("pdserve_bench"):
                raise
            raise Unavailable(f"pdserve {self.name} needs {error.name}: run `pdserve install`.") from None
        text, _, examples = (inspect.getdoc(function) or "").partition("\nexamples:\n")
        if self.name == "frontend":  # a frontend spans no hosts
            examples = re.sub(r".*--node-rank.*\n", "", examples)
        app = typer.Typer(**_PLAIN)
        app.command(self.name, cls=_Command, help=text, epilog=f"examples:\n{examples}\n")(function)
        command = get_command(app)
        if self.name == "frontend":
            command.params = [each for each in command.params if each.name != "node_rank"]
        return command
