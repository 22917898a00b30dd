"""Images in requests, with vLLM's formats and errors, on workers with simulated engines."""

import base64
import io
import random
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest
import pytest_asyncio
from PIL import Image

from pdserve.config.api_keys import ApiKey, KeyLimits
from pdserve.frontend.edge.body import Budget
from pdserve.frontend.keys.auth import ApiKeys
from pdserve.frontend.vllm import images
from pdserve.registry.keys import SETTINGS
from tests.conditions import until
from tests.frontend.conftest import Graph, running_graph
from tests.frontend.model.sims import sim_engines
from tests.memory.registry import MemoryRegistry
from tools.demo_model import sight

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "Say what you see. " * 8


def png(color: str = "", size: tuple[int, int] = (40, 30)) -> bytes:
    """An image of one color, or of noise, which does not compress."""
    noise = random.Random(0).randbytes(3 * size[0] * size[1])
    image = Image.new("RGB", size, color) if color else Image.frombytes("RGB", size, noise)
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def data(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def part(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


RED, BLUE, LARGE = (data(png("red")), data(png("blue")), data(png(size=(300, 200))))


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response({"/red": 200, "/moved": 302, "/huge": 200}.get(self.path, 404))
        self.send_header("location", "/red")
        self.end_headers()
        found = {"/red": png("red"), "/huge": png("red") + bytes(33 << 20)}
        with suppress(OSError):
            self.wfile.write(found.get(self.path, b""))
        self.server.asked.append(self.path)  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def pages() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        server.asked = []  # type: ignore[attr-defined]
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Graph]:
    """Serve `demo`, which reads only data: URLs, and `open`, which fetches from one host too."""
    folder = sight.make(tmp_path_factory.mktemp("sight"))
    args = {"allowed-media-domains": ["127.0.0.1"]}
    async with AsyncExitStack() as stack:
        graph = await stack.enter_async_context(running_graph(tmp_path_factory.mktemp("state")))
        await stack.enter_async_context(sim_engines(graph, 2, 1, folder=folder))
        await stack.enter_async_context(sim_engines(graph, 1, model="open", folder=folder, args=args))
        yield graph


async def ask(graph: Graph, *parts: dict[str, Any], text: str = TEXT, **more: Any) -> httpx.Response:
    return await graph.http.post("/v1/chat/completions", json=asked(*parts, text=text, **more))


def asked(*parts: dict[str, Any], text: str = TEXT, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]
    return {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0} | more


async def said(graph: Graph, *parts: dict[str, Any], **more: Any) -> str:
    answer = await ask(graph, *parts, **more)
    return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


async def test_a_prompt_goes_where_its_image_is_cached(seeing: Graph) -> None:
    async with MemoryRegistry(seeing.registry) as registry:
        await registry.put(f"{SETTINGS}router", b"kv")
    text = "Another question. " * 8
    found = {}
    for name, url in {"red": RED, "blue": BLUE, "again": RED}.items():
        found[name] = await ask(seeing, part(url), text=text)
    workers = {name: answer.headers["x-pdserve-instance"] for name, answer in found.items()}
    assert workers["again"] == workers["red"]
    assert [answer.headers["x-pdserve-prefill"] for answer in found.values()] == ["remote", "remote", "local"]


async def test_all_routes_accept_large_images(seeing: Graph) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": LARGE.partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "x"}]
    items = [{"type": "input_image", "image_url": LARGE}, {"type": "input_text", "text": "x"}]
    limit, answers = {"model": "demo", "max_tokens": 4}, []
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [part(LARGE)]}]},
        "/v1/messages": {"messages": [{"role": "user", "content": content}]},
        "/v1/responses": {"input": [{"role": "user", "content": items}], "max_output_tokens": 4},
        "/tokenize": {"messages": [{"role": "user", "content": [part(LARGE)]}]},
    }
    for path, body in bodies.items():
        answers.append(await seeing.http.post(path, json=limit | body))
        assert answers[-1].status_code == 200, answers[-1].text


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://127.0.0.1:{port}/red", "allowed-media-domains names no host"),
        (" HTTP://127.0.0.1:{port}/red", "allowed-media-domains names no host"),
        ("file:///etc/passwd", "Cannot load local files"),
        ("", "is missing"),
    ],
)
async def test_image_urls_that_cannot_be_read_are_refused(
    seeing: Graph, pages: ThreadingHTTPServer, url: str, text: str
) -> None:
    """(More cases: tests/e2e/test_images.py.)"""
    answer = await ask(seeing, part(url.format(port=pages.server_port), uuid="mine"))
    assert (answer.status_code, text in answer.text) == (400, True), answer.text
    assert not pages.asked, "nothing was fetched"  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [1, 70_000])
async def test_images_are_fetched_only_from_allowed_hosts(
    seeing: Graph, pages: ThreadingHTTPServer, size: int
) -> None:
    """Large requests are read on another event loop."""
    text, at = "y" * size if size > 1 else TEXT, f"http://127.0.0.1:{pages.server_port}"
    if size == 1:
        assert await said(seeing, part(f"{at}/red"), model="open") == await said(seeing, part(RED))
    for url, status in {"/moved": 400, "/none": 422, "/huge": 422}.items():
        assert (await ask(seeing, part(at + url), model="open", text=text)).status_code == status
    elsewhere = await ask(seeing, part(at.replace("127.0.0.1", "localhost")), model="open", text=text)
    assert (elsewhere.status_code, "allowed domains" in elsewhere.text) == (400, True)


def blank(side: int, kind: str = "PNG", mode: str = "1") -> str:
    """An image of one color, which compresses well."""
    Image.new(mode, (side, side)).save(file := io.BytesIO(), kind)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def peak_memory() -> int:
    """Peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def used() -> int:
    """Pixels that the budget counts now."""
    return images.pixel_budget.used - sum(pixels for _, pixels in images._freed)


async def test_pixels_of_a_request_are_bounded(seeing: Graph) -> None:
    before = peak_memory()
    answer = await ask(seeing, *[part(blank(5792)) for _ in range(16)])
    assert (answer.status_code, "33554432 pixels together" in answer.text) == (400, True), answer.text
    assert peak_memory() - before < 1 << 30
    await until(lambda: not used())


async def test_many_small_images_are_bounded(seeing: Graph) -> None:
    """Each image counts as at least `MIN_COUNTED` pixels."""
    conversation = [{"role": "user", "content": [part(RED) for _ in range(16)]}]
    body = {"model": "demo", "messages": [conversation] * 3, "max_tokens": 1}
    answer = await seeing.http.post("/v1/chat/completions/batch", json=body)
    assert (answer.status_code, "together" in answer.text) == (400, True), answer.text


async def test_pixels_of_all_requests_are_bounded(seeing: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels count only until the prompt is rendered, not until the response ends."""
    monkeypatch.setattr(images, "pixel_budget", Budget(2 * images.MIN_COUNTED, "{} pixels"))
    answer = await ask(seeing, *[part(RED)] * 2)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1"), answer.text
    assert answer.json()["error"]["type"] == "RateLimitError"
    await until(lambda: not used())
    async with seeing.http.stream(
        "POST", "/v1/chat/completions", json=asked(part(RED), stream=True)
    ) as stream:
        assert stream.status_code == 200
        assert not used()


KINDS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "ICO", "ICNS", "TGA", "JPEG2000", "DDS", "AVIF")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_broken_image_of_any_kind_is_no_server_error(seeing: Graph, kind: str) -> None:
    Image.new("RGB", (64, 64), "red").save(file := io.BytesIO(), kind)
    dice = random.Random(kind)
    for _ in range(40):
        broken = bytearray(file.getvalue()[: dice.randint(12, len(file.getvalue()))])
        for _ in range(dice.randint(0, 6)):
            broken[dice.randrange(len(broken))] = dice.randrange(256)
        answer = await ask(seeing, part(data(bytes(broken))), max_tokens=1)
        assert answer.status_code in (200, 400), answer.text


async def test_an_image_fits_the_tokens_of_a_key(seeing: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image's base64 has 480,000 characters; the prompt has 68 tokens for the image."""
    keys = ApiKeys([ApiKey.of("a-key", "alice", KeyLimits(tokens_per_minute=10_000))])
    monkeypatch.setattr(seeing.app, "_keys", keys)
    large = part(data(png(size=(400, 300))))
    body, key = asked(large, max_tokens=8), {"authorization": "Bearer a-key"}
    for _ in range(2):
        answer = await seeing.http.post("/v1/chat/completions", json=body, headers=key)
        assert answer.status_code == 200, answer.text
    left = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert 8000 < left < 10_000
