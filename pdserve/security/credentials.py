"""The graph's certificates for mutual TLS between its processes.

A folder contains `ca.pem`, the graph's certificate authority, and `node.pem` and `node-key.pem`, the certificate and
key of all its processes, including NATS and etcd. A process with a certificate of this authority belongs to the graph;
nothing else is checked. All hosts have a copy of the folder (docs/decisions/0032-one-folder-of-credentials.md).
"""

import hmac
import os
import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Self

from pdserve.util import clock
from pdserve.util.errors import ConfigError
from pdserve.util.program import pdserve_command

if TYPE_CHECKING:
    from cryptography import x509

CERTIFICATE_NAME = "pdserve"
"""DNS name in each `node.pem`, in addition to the hosts' names, for clients that must check a name."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([\w-]*\w)?(\.[A-Za-z0-9_]([\w-]*\w)?)*", re.ASCII)
VALIDITY = timedelta(days=3650)
EXPIRY_WARNING = timedelta(days=30)
"""Time before the expiry of a certificate at which warnings begin."""
_ALWAYS = datetime(1970, 1, 1, tzinfo=UTC)
"""Start of validity, before any clock's time."""
_FOR_EVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""End of validity of certificates that never expire (RFC 5280)."""


@dataclass(frozen=True)
class Credentials:
    folder: Path

    @classmethod
    def load(cls, folder: Path | None) -> Self | None:
        """Return None without a folder. Raises ConfigError if its files cannot be used, or other users can read its
        key."""
        if folder is None:
            return None
        credentials = cls(folder)
        try:
            if _open_to_others(credentials.key.stat()):
                raise ConfigError(
                    [f"{credentials.key} can be read by other users: chmod 600 {credentials.key}."]
                )
            _ = credentials.client
        except OSError as error:  # ssl's errors are OSErrors too
            text = f"make one with `{pdserve_command('credentials FOLDER')}`, or copy the graph's from another host."
            raise ConfigError([f"Security.credentials: {folder} cannot be used ({error}): {text}"]) from error
        return credentials

    @property
    def authority(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def certificate(self) -> Path:
        return self.folder / "node.pem"

    @property
    def key(self) -> Path:
        return self.folder / "node-key.pem"

    def secret(self, purpose: str) -> bytes:
        """Return 32 bytes that only processes of the graph can derive, for protocols without TLS."""
        return hmac.digest(self.key.read_bytes(), purpose.encode(), "sha256")

    @cached_property
    def client(self) -> ssl.SSLContext:
        """The SSL context of all client connections; do not change it. It stays the same when the folder is
        replaced."""
        return self.client_context()

    def client_context(self) -> ssl.SSLContext:
        """Return a new context with the node's certificate that accepts any server of the graph, under any name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._of_graph(context)

    def server_context(self) -> ssl.SSLContext:
        """Return a new context that accepts clients with a certificate of the graph."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._of_graph(context)

    def _of_graph(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self.authority)
        context.load_cert_chain(self.certificate, self.key)
        return context


def _open_to_others(key: os.stat_result) -> bool:
    """Whether other users can read or change the key. Its group may read it if root or another user owns it, as in
    Kubernetes' Secrets (root:fsGroup, mode 0440)."""
    may_have_group = key.st_uid != os.geteuid() or (key.st_uid == 0 and key.st_gid != 0)
    return bool(key.st_mode & (0o037 if may_have_group else 0o077))


def expiry_warning(certificates: Path) -> str | None:
    """Return "expired on ..." or "is valid only until ..." if a certificate of this PEM file has expired or will within
    `EXPIRY_WARNING`, else None. Raises OSError, and ValueError if the file has no certificate."""
    until = valid_until(certificates)
    now = datetime.fromtimestamp(clock.unix(), UTC)
    if until - now > EXPIRY_WARNING:
        return None
    return f"{'expired on' if until <= now else 'is valid only until'} {until:%Y-%m-%d %H:%M} UTC"


def valid_until(certificates: Path) -> datetime:
    """Return the earliest expiry of a certificate in this PEM file. Raises OSError, and ValueError if there is none."""
    from cryptography import x509

    parsed = x509.load_pem_x509_certificates(certificates.read_bytes())
    return min(certificate.not_valid_after_utc for certificate in parsed)


def create(
    folder: Path, hosts: Iterable[str] = LOCAL_HOSTS, valid: timedelta | None = VALIDITY
) -> Credentials:
    """Replace the folder by one with a new authority and a node certificate for `hosts`. Only this user can read it.
    The authority's key is not kept, so a new certificate means a new folder on all hosts. With `valid` None the
    certificates never expire. Raises OSError, and ValueError for an invalid host name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Credentials(Path(mkdtemp(prefix=f"{folder.name}.", dir=folder.parent)))  # mode 0700
    try:
        until = _FOR_EVER if valid is None else datetime.fromtimestamp(clock.unix(), UTC) + valid
        _write(fresh, hosts, until)
        if folder.exists():
            rmtree(folder)
        fresh.folder.rename(folder)
    except BaseException:
        rmtree(fresh.folder, ignore_errors=True)
        raise
    return Credentials(folder)


def _write(to: Credentials, hosts: Iterable[str], until: datetime) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    authority_key, node_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pdserve graph")])
    node_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CERTIFICATE_NAME)])

    def certificate(name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(authority_name)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return builder.not_valid_before(_ALWAYS).not_valid_after(until)

    signs = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    authority = (
        certificate(authority_name, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    node = (
        certificate(node_name, node_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(CERTIFICATE_NAME), *map(_alternative, hosts)]),
            critical=False,
        )
        .add_extension(usages, critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    to.authority.write_bytes(authority.public_bytes(Encoding.PEM))
    to.certificate.write_bytes(node.public_bytes(Encoding.PEM))
    to.key.touch(mode=0o600)
    to.key.write_bytes(node_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _alternative(host: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        if not _HOST_NAME.fullmatch(host):
            raise ValueError(f"{host!r} is no host name or IP address") from None
        return x509.DNSName(host)
