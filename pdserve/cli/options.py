"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

File = Annotated[
    Path, typer.Option("-f", "--file", metavar="FILE", help="the graph; `pdserve init` writes one")
]
DemoFile = Annotated[
    Path,
    typer.Option("-f", "--file", metavar="FILE", help="the graph", show_default="of the bundled demo model"),
]
LogFormat = Annotated[
    Literal["text", "json"],
    typer.Option(envvar="PDSERVE_LOG_FORMAT", help="json: one object per line, for machines"),
]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="also log vLLM's own INFO lines")]
Simulated = Annotated[
    bool,
    typer.Option(
        "--simulated",
        help="simulate all engines: no GPU, no weights, meaningless tokens (also: PDSERVE_SIMULATED=1)",
    ),
]
GraphFile = Annotated[
    Path | None,
    typer.Option(
        "-f",
        "--file",
        metavar="FILE",
        help="the graph's file (default: the graph that runs on the default state directory)",
    ),
]
Etcd = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="the graph's etcd, instead of a file")]
Namespace = Annotated[
    str | None, typer.Option(metavar="NAME", help="the graph's, with --etcd (default: pdserve)")
]
CredentialsFolder = Annotated[
    Path | None,
    typer.Option(
        "--credentials",
        metavar="FOLDER",
        envvar="PDSERVE_CREDENTIALS",
        help="the graph's credentials, with --etcd (default: as the file or the running graph says)",
    ),
]
