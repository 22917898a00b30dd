"""CORS: which web pages may use the frontend from a browser.

The frontend's own pages always may. If `Frontend.allowed-origins` is set, the pages that it lists may, too, and no
others. Otherwise, if requests need a key, any page may, because it needs the key, too. If they need none, only pages of
this machine may: any other page could send requests through the browser of a user of this machine.

While requests need no key, a frontend on loopback refuses Host headers of other machines that are not listed, because a
page's host name could resolve to loopback (DNS rebinding).
"""

import re
from collections.abc import Collection, Sequence, Sized
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.frontend.edge.response import HttpError, error_response
from pdserve.util.net import is_local_host_header, is_loopback

ANY = "*"
_HERE = re.compile(r"https?://(localhost|[\w.-]+\.localhost|127(\.\d+){3}|\[::1\])(:\d+)?")


class CrossOrigin:
    """Middleware that refuses requests from web pages of origins that are not allowed."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Sized,
        allowed: Sequence[str] = (),
        *,
        host: str = "",
        open_paths: Collection[str] = (),
    ) -> None:
        """`keys`: empty while requests need none. `host`: the address that the frontend listens on. `open_paths`: paths
        that need no key, at least from this machine."""
        self._app, self._keys, self._allowed, self._open = app, keys, allowed, open_paths
        self._hosts = {urlsplit(origin).hostname for origin in allowed}
        self._check_host = is_loopback(host) and ANY not in allowed
        here = None if allowed else _HERE.pattern
        self._with_keys = _cors(app, allowed or [ANY])
        self._without = _cors(app, allowed, here)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, headers = self._app, Headers(scope=scope)
        if self._keys:
            if scope["path"] not in self._open or self._allowed:
                app = self._with_keys
        elif refusal := self._refusal(headers):
            app = error_response(scope["path"], HttpError(403, refusal))
        else:
            app = self._without
        await app(scope, receive, send)

    def _refusal(self, headers: Headers) -> str:
        """Return why a request without a key is refused; empty if it is allowed."""
        host, origin = headers.get("host", ""), headers.get("origin", "")
        hint = "list it in Frontend.allowed-origins, or let requests need an API key"
        if self._check_host and host and not is_local_host_header(host) and _name(host) not in self._hosts:
            return f"this server is not {host!r}: ask it at 127.0.0.1 or localhost, or {hint}"
        if origin and origin.partition("://")[2] != host and not self._without.is_allowed_origin(origin):
            return f"pages of {origin!r} may not use this server: {hint}"
        return ""


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return ""


def _cors(app: ASGIApp, origins: Sequence[str], pattern: str | None = None) -> CORSMiddleware:
    """Let pages read all response headers, such as the request's id and what its key's limits leave."""
    return CORSMiddleware(app, origins, ["*"], ["*"], allow_origin_regex=pattern, expose_headers=["*"])
