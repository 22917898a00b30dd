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
            metavar="NAME", help="host name of NATS or etcd, for clients that check names; may be repeated"
        ),
    ] = None,
) -> int:
    """Make the credentials of a graph on several hosts, or with your own NATS and etcd: a certificate that all its
    processes show, including NATS and etcd, and the authority that signed it. They accept connections with this
    certificate only, and encrypt them. Copy the folder to every host, and keep it secret.
    (`serve` makes its own credentials if it starts NATS and etcd itself.)

    They are valid for ten years. To change them, make new ones, copy them, and restart NATS, etcd and the graph.

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
    print(_next_steps(Credentials(folder.absolute())))
    return 0


def _next_steps(made: Credentials) -> str:
    return f"""\
Made {made.folder}. Keep it secret: it gives access to the graph.

1. Copy the folder to each host of the graph, readable by its user only (chmod 700), for example:
     scp -pr {made.folder} HOST:
2. Name it in the graph's YAML on each host (or with PDSERVE_CREDENTIALS):
     Security:
       credentials: {made.folder}
3. Give your own NATS and etcd the same files, as deploy/docker-compose.yml does. With ADDRESS set, and run by what
   starts them again:
     echo 'max_payload: 8MB' > nats.conf  # NATS has no flag for this; 1 MB is too small for the longest prompts
     nats-server --config nats.conf --addr $ADDRESS --port 4222 --jetstream --store_dir nats --tls --tlsverify \\
       --tlscert {made.certificate} --tlskey {made.key} --tlscacert {made.authority}
     etcd --data-dir etcd --auto-compaction-mode revision --auto-compaction-retention 1000 \\
       --quota-backend-bytes 1073741824 --client-cert-auth \\
       --cert-file {made.certificate} --key-file {made.key} --trusted-ca-file {made.authority} \\
       --listen-client-urls https://$ADDRESS:2379 --advertise-client-urls https://$ADDRESS:2379
"""
