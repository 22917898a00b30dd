"""Checks the wheel and sdist of `make release` and prints the manual steps left: `python -m tools.release dist`."""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

NEEDED = (
    "pdserve/install/cpu.txt",
    "pdserve/install/gpu.txt",
    "pdserve/demo/local.yaml",
    "pdserve/files/configs/disagg.yaml",
    "pdserve/files/chart/templates/_helpers.tpl",
    "pdserve/files/compose/grafana/provisioning/dashboards/pdserve.json",
    "pdserve/files/systemd/pdserve-.service.d/common.conf",
    "pdserve/demo/model/model.safetensors",
    "pdserve/frontend/observability/dashboard/index.html",
    "pdserve/py.typed",
    "pdserve_bench/__init__.py",
    "LICENSE",
)
"""Files that the wheel and the sdist must contain, by the end of their path."""


def problems(archive: Path) -> list[str]:
    """Return the reasons not to publish a wheel or an sdist."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = wheel.namelist()
            (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            metadata = wheel.read(about)
    else:
        with tarfile.open(archive) as sdist:
            names = sdist.getnames()
            file = sdist.extractfile(f"{names[0]}/PKG-INFO")
            metadata = file.read() if file else b""
    found = [f"{name} is missing" for name in NEEDED if not any(each.endswith(name) for each in names)]
    found += [
        f"{name} must not be packaged"
        for name in names
        if "tests" in Path(name).parts or "__pycache__" in name
    ]
    try:
        read = Metadata.from_email(metadata, validate=True)
    except ExceptionGroup as group:
        return found + [str(error) for error in group.exceptions]
    if read.license_expression != "Apache-2.0" or not read.description:
        found.append("the license or the description is missing")
    relative = re.findall(r"\]\((?!https?:|#)([^)]+)", read.description or "")
    found += [f"the readme's link to {link} leads nowhere on an index" for link in relative]
    return found


def main(folder: Path) -> int:
    archives = sorted([*folder.glob("pdserve-*.whl"), *folder.glob("pdserve-*.tar.gz")])
    wrong = [f"{archive.name}: {text}" for archive in archives for text in problems(archive)]
    if len(archives) != 2:
        wrong.append(
            f"{folder} must have one wheel and one sdist, not {[archive.name for archive in archives]}"
        )
    for archive in archives:
        print(f"{archive}  {archive.stat().st_size / 1e6:.1f} MB")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    version = archives[0].name.split("-")[1]
    print(f"""Wheel and sdist are complete. Left to do by hand:
  make test                                            on a fresh machine
  git tag -s v{version} && git push origin v{version}  a signed tag; the workflow builds and attests the release
  uv publish dist/*.whl dist/*.tar.gz                  needs a PyPI token
  make wire && git add tests/wire && git commit        the messages that the next version has to understand
  docker build -f deploy/Dockerfile -t pdserve:{version} .
  docker build -f deploy/Dockerfile -t pdserve:{version}-gpu --build-arg PLATFORM=gpu .""")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
