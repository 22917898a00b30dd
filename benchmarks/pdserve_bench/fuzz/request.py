"""A fuzz request: its bytes on the wire, and a curl command that repeats it."""

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class FuzzRequest:
    name: str
    path: str
    raw: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    """Added to the usual ones, or replacing them."""
    method: str = "POST"
    expected: frozenset[int] | None = None
    """Statuses allowed beside 429, 0 for no response; None: any below 500."""
    leaves: float | None = None
    """Seconds until its client disconnects; None: it reads to the end."""
    twin: str = ""
    """Name of the same request without `stream`, sent earlier; the statuses must be equal."""

    def wire(self, host: str) -> bytes:
        lines = {
            "host": host,
            "connection": "close",
            "content-type": "application/json",
            "content-length": str(len(self.raw)),
            **self.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"{self.method} {self.path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + self.raw

    def curl(self, url: str, folder: Path) -> str:
        """Return a command that repeats the request. A body that cannot be typed is saved in `folder`."""
        words = ["curl", "-isS", "--path-as-is", "-X", self.method, f"{url}{self.path}"]
        for name, value in {"content-type": "application/json", **self.headers}.items():
            words += ["-H", f"{name}: {value}" if value else f"{name};"]
        if len(self.raw) < 2000 and self.raw.isascii() and b"\0" not in self.raw:
            words += ["--data-binary", self.raw.decode()] if self.raw else []
        else:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{hashlib.sha256(self.raw).hexdigest()[:12]}.body"
            file.write_bytes(self.raw)
            words += ["--data-binary", f"@{file}"]
        return shlex.join(words)
