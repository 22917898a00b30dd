"""Which web pages may use the frontend from a browser: CORS, and protection from DNS rebinding."""

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient

from pdserve.frontend.keys.origins import CrossOrigin

OPEN = ("/health", "/metrics")


class Pages:
    def __init__(self, keys: list[str], allowed: list[str] | None = None, host: str = "127.0.0.1") -> None:
        self.asked = 0
        app = Starlette()
        app.add_route("/{path:path}", self._answer, ["GET", "POST"])
        self.http = TestClient(
            CrossOrigin(app, keys, allowed or [], host=host, open_paths=OPEN), "http://127.0.0.1:8000"
        )

    def _answer(self, _: Request) -> Response:
        self.asked += 1
        return PlainTextResponse("answer")

    def ask(
        self, origin: str = "", host: str = "127.0.0.1:8000", path: str = "/v1/models"
    ) -> tuple[int, str]:
        """Return the status, and the origin that may read the answer."""
        headers = {"host": host, **({"origin": origin} if origin else {})}
        answer = self.http.post(path, headers=headers)
        assert (answer.status_code == 200) is (answer.text == "answer")
        return answer.status_code, answer.headers.get("access-control-allow-origin", "")

    def preflight(self, origin: str) -> int:
        headers = {"origin": origin, "access-control-request-method": "POST"}
        headers["access-control-request-headers"] = "authorization"
        return self.http.options("/v1/models", headers=headers).status_code


EVIL, CHAT = "https://evil.example", "https://chat.example.com"


def test_without_keys_only_pages_of_this_machine_are_served() -> None:
    pages = Pages([])
    for here in ("http://localhost:3000", "http://127.0.0.1", "https://app.localhost", "http://[::1]:5173"):
        assert pages.ask(here) == (200, here)
        assert pages.preflight(here) == 200
    assert pages.ask("http://127.0.0.1:8000")[0] == 200  # the frontend's own /docs
    for name in ("localhost:8000", "LOCALHOST", "127.0.0.1:9", "10.1.2.3", "[::1]:8000", "a.localhost"):
        assert pages.ask(host=name) == (200, "")
    asked = pages.asked
    for other in (EVIL, "null", "http://localhost.evil.example", "http://127.0.0.1.evil.example", "file://"):
        # refused before it is processed, because a page may need no answer to do harm
        assert pages.ask(other) == (403, "")
        assert pages.preflight(other) == 403
        assert pages.ask(other, path="/requests") == (403, "")
    assert pages.asked == asked


@pytest.mark.parametrize(
    "name", ["evil.example:8000", "evil.example", "localhost.evil.example", "[::1", "127.0.0.1.nip.io"]
)
def test_a_rebound_dns_name_is_refused_without_keys(name: str) -> None:
    assert Pages([]).ask(host=name)[0] == 403
    assert Pages([]).ask(f"http://{name}", host=name)[0] == 403
    assert Pages(["key"]).ask(host=name)[0] == 200  # the page would need the key
    assert Pages([], host="0.0.0.0").ask(host=name)[0] == 200  # a public address may have any name


def test_with_keys_any_page_may_use_paths_that_need_a_key() -> None:
    keys: list[str] = []
    pages = Pages(keys)
    assert pages.ask(EVIL)[0] == 403
    keys.append("key")  # keys may be added at run time
    assert pages.ask(EVIL) == (200, "*")
    answer = pages.http.get("/v1/models", headers={"origin": EVIL})
    assert answer.headers["access-control-expose-headers"] == "*"
    assert pages.preflight(EVIL) == 200
    assert pages.ask(EVIL, path="/health") == pages.ask(EVIL, path="/metrics") == (200, "")


@pytest.mark.parametrize("keys", [[], ["key"]])
def test_allowed_origins(keys: list[str]) -> None:
    pages = Pages(keys, [CHAT])
    assert pages.ask(CHAT) == (200, CHAT)
    assert pages.preflight(CHAT) == 200
    assert pages.preflight(EVIL) in (400, 403)
    assert pages.ask(EVIL)[1] == pages.ask("http://localhost:3000")[1] == ""
    assert pages.ask(EVIL)[0] == (200 if keys else 403)
    assert pages.ask(host="chat.example.com")[0] == 200  # a proxy on this machine forwards this host
    everything = Pages(keys, ["*"])
    assert everything.ask(EVIL, host="any.example") == (200, "*")
