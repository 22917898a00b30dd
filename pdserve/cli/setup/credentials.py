"""`pdserve credentials`."""

from pathlib import Path
from typing import Annotated

import typer

from pdserve.security.credentials import LOCAL_HOSTS, Credentials, create
from pdserve.util.errors import ConfigError


def make_credentials(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="of NATS or etcd, for other clients that check names; may be repeated"
        ),
    ] = None,
) -> int:
    """Make the credentials of a graph on several hosts, or with a NATS and an etcd of your own: a certificate that each
    of its processes shows, NATS and etcd too, and the authority that signed it. What shows no such certificate gets
    nothing from them, and all between them is encrypted. Every host needs a copy of the folder, and
    nothing else may read it. (`serve` makes its own where it starts NATS and etcd itself.)

    They are valid for ten years. To change them: make new ones, copy them, restart NATS, etcd and the graph.

    examples:
      pdserve credentials ./secrets
      pdserve credentials ./secrets --host nats.example.com --host etcd.example.com
    """
    if folder.exists():
        raise ConfigError([f"{folder} exists: choose another folder, or remove it first."])
    try:
        create(folder, [*LOCAL_HOSTS, *(host or [])])
    except ValueError as error:
        raise ConfigError(
            [f"--host: {error}: use a name as in nats.example.com, or an address as in 10.0.0.5."]
        ) from error
    except OSError as error:
        raise ConfigError([f"{folder} cannot be written: {error.strerror or error}."]) from error
    print(_next(Credentials(folder.absolute())))
    return 0


def _next(made: Credentials) -> str:
    """The text that says what to do with the folder."""
    return f"""\
Made {made.folder}. Keep it secret: it lets in whatever has it.

1. Copy the folder to each host of the graph, readable by its user alone (chmod 700), for example:
     scp -pr {made.folder} HOST:
2. Name it in the graph's YAML on each host (or by PDSERVE_CREDENTIALS):
     Security:
       credentials: {made.folder}
3. NATS and etcd of your own take the same files (deploy/docker-compose.yml has all of it):
     echo 'max_payload: 8MB' > nats.conf  # it has no flag for this: 1 MB is too little for the longest prompts
     nats-server --config nats.conf --jetstream --tls --tlsverify \\
       --tlscert {made.certificate} --tlskey {made.key} --tlscacert {made.authority} ...
     etcd --client-cert-auth --cert-file {made.certificate} --key-file {made.key} --trusted-ca-file {made.authority} \\
       --listen-client-urls https://ADDRESS:2379 --advertise-client-urls https://ADDRESS:2379 ...  # http would be plain
"""
