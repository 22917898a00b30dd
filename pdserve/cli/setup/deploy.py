"""`pdserve deploy`, and the examples of `pdserve init`: writes files that the wheel contains."""

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pdserve.util.errors import ConfigError

FILES = Path(__file__).parents[2] / "files"
"""Folder of the files that the wheel contains; in a checkout, it has links to files in `configs/` and `deploy/`."""
_IN_CHECKOUT = {"chart": "deploy/helm/pdserve", "compose": "deploy", "systemd": "deploy/systemd"}


class Form(StrEnum):
    CHART = "chart"
    COMPOSE = "compose"
    SYSTEMD = "systemd"


def deploy(
    form: Annotated[Form, typer.Argument(metavar="chart|compose|systemd")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a new folder")],
) -> int:
    """Write the files for one form of deployment into DIR: the Helm chart; Compose files of NATS, etcd, Prometheus with
    alerts and Grafana; or systemd units. They fit this version of pdserve. DIR must not exist.

    examples:
      pdserve deploy chart chart && helm install pdserve chart -f values.yaml
      pdserve deploy compose servers
      pdserve deploy systemd units
    """
    try:
        shutil.copytree(FILES / form.value, folder)
        for file in folder.rglob("*.yml"):
            file.write_text(_with_paths(file.read_text(), _IN_CHECKOUT[form.value], str(folder)))
    except FileExistsError:
        raise ConfigError([f"{folder} exists: choose another folder, or remove it first."]) from None
    except OSError as error:
        raise ConfigError([f"{folder} cannot be written: {error}."]) from error
    print(f"Wrote {folder}.")
    return 0


def _with_paths(text: str, old: str, new: str) -> str:
    """Replace the checkout's folder in comments, which show commands."""
    lines = text.splitlines(keepends=True)
    return "".join(line.replace(f"{old}/", f"{new}/") if line.startswith("#") else line for line in lines)


def examples() -> str:
    """Return the names of the example graphs, each with the first line of its file."""
    texts = {path.stem: path.read_text() for path in sorted((FILES / "configs").glob("*.yaml"))}
    return "\n".join(f"  {name:<8} {text.splitlines()[0][2:]}" for name, text in texts.items())


def example(name: str, file: Path) -> str:
    """Return the text of an example graph, with commands for `file`. Raises ConfigError, with all names, for a wrong
    name."""
    path = FILES / "configs" / f"{name}.yaml"
    if not path.exists():
        raise ConfigError([f"no example is named {name!r}; there are:\n{examples()}"])
    return path.read_text().replace(f"configs/{name}.yaml", str(file))
