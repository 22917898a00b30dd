"""The TLS certificate of the OpenAI API: `Security.tls-certificate` and `tls-key`. `credentials.py` has the
certificates for connections between processes."""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pdserve.util import clock
from pdserve.util.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509


@dataclass(frozen=True)
class ServerCertificate:
    chain: Path
    """PEM file: the server's own certificate first, then the intermediate certificates"""
    key: Path
    """PEM file, not encrypted"""

    @classmethod
    def of(cls, chain: Path | None, key: Path | None) -> Self | None:
        """Return None if the API is plain HTTP."""
        return cls(chain, key) if chain and key else None

    def context(self) -> ssl.SSLContext:
        """Return the SSL context for clients' connections. Raises ConfigError if the files cannot be used."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._check_dates()
        _read(self.key, "tls-key")
        try:
            context.load_cert_chain(self.chain, self.key, password=self._no_passphrase)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                text = f"is not the key of the first certificate in {self.chain}: name the pair that was made together."
            else:
                text = f"cannot be used with {self.chain} ({error.reason or error}): both must be PEM."
            raise ConfigError([f"Security.tls-key: {self.key} {text}"]) from None
        return context

    def valid_until(self) -> datetime:
        """Raises ConfigError."""
        return self._own().not_valid_after_utc

    def _check_dates(self) -> None:
        own, now = self._own(), datetime.fromtimestamp(clock.unix(), UTC)
        text = ""
        if own.not_valid_after_utc < now:
            text = f"expired on {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: renew it."
        elif own.not_valid_before_utc > now:
            text = f"is not valid before {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC: is this machine's clock right?"
        if text:
            raise ConfigError([f"Security.tls-certificate: {self.chain} {text}"])

    def _own(self) -> "x509.Certificate":
        from cryptography import x509

        raw = _read(self.chain, "tls-certificate")
        try:
            return x509.load_pem_x509_certificates(raw)[0]
        except ValueError:
            text = "holds no certificate in PEM (-----BEGIN CERTIFICATE-----)."
            raise ConfigError([f"Security.tls-certificate: {self.chain} {text}"]) from None

    def _no_passphrase(self) -> str:
        """Refuse an encrypted key, for which ssl would ask for a passphrase on the terminal."""
        text = "is encrypted, and a server has no passphrase: openssl pkey -in FILE -out PLAIN_FILE, then chmod 600."
        raise ConfigError([f"Security.tls-key: {self.key} {text}"])


def _read(file: Path, key: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError([f"Security.{key}: {file} cannot be read ({error.strerror})."]) from None
