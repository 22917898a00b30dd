"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ApiKey = Annotated[str, typer.Option(metavar="KEY", envvar="OPENAI_API_KEY", help="sent as Bearer token")]
Ttft = Annotated[str, typer.Option(metavar="TIME", help="SLO: the first token comes within this")]
Gap = Annotated[str, typer.Option(metavar="TIME", help="and no two tokens are further apart")]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="write the result there too")]
Plot = Annotated[
    Path | None, typer.Option(metavar="NAME", help="draw NAME.png and NAME.html, or only the one named")
]
