"""`/dashboard` in headless Chromium, served by a real frontend of a graph with simulated engines in this process. What
is wrong in a graph is tested by tables in `tests/test_problems.py`."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Request, Route, async_playwright, expect

from pdserve.config.api_keys import ApiKey
from pdserve.config.schema import Config, DecodeConfig, FrontendConfig, PrefillConfig
from pdserve.engine.sim.engine import SimEngine
from pdserve.frontend.keys.auth import Viewer
from pdserve.frontend.server import Frontend
from pdserve.frontend.watching.dashboard import page as dashboard
from pdserve.frontend.watching.dashboard.page import SHELL, Dashboard, told
from pdserve.graph import service_of
from pdserve.observe.graph_state import graph_state
from pdserve.observe.pages import serve_pages
from pdserve.plan.slots import Slot
from pdserve.process.life import Service
from pdserve.process.worker import EngineWorker
from pdserve.records import Instance, ModelCard, Role, SlotState, encode_record
from pdserve.registry import connect, keys
from pdserve.tasks import Owner
from pdserve.watch import LinkState, Outage, Receipt, Watched
from tests.conditions import until
from tests.frontend.conftest import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEEDS = {"step-seconds": 0.005, "prefill-rate": 50_000, "bandwidth": 1e9}
SLOW = {**SPEEDS, "bandwidth": 1e6}
LONG = list(range(300, 600))
XSS = '<img src=x onerror="window.hacked = 1">'
EVERY = 200
"""milliseconds between two looks of the page, and of the frontend"""
expect.set_options(timeout=30_000)


def engine_args(sim: dict[str, float]) -> dict[str, object]:
    return {"max-model-len": 4096, "block-size": 16, "additional-config": {"sim": sim}}


class WatchedGraph:
    """Processes of a graph, each as its own process runs it, but in this one."""

    def __init__(self, state: Path) -> None:
        self.config = Config(
            path=state / "test.yaml",
            model=str(MODEL),
            served_model_name="demo",
            frontend=FrontendConfig(port=0),
            decode=DecodeConfig(
                engine="sim",
                engine_args=engine_args(SPEEDS),
                remote_prefill=True,
                max_local_prefill_length=32,
                max_prefill_queue_size=2,
            ),
            # with room for one long prompt, so that the others stay in the queue
            prefill=PrefillConfig(
                engine="sim", engine_args=engine_args(SPEEDS) | {"num-gpu-blocks-override": 256}
            ),
            nats=f"memory://{state.name}",
            etcd=f"memory://{state.name}",
            state_dir=state,
            request_timeout=30.0,
            drain_timeout=1.0,
        )
        assert self.config.etcd is not None
        self.registry = connect(self.config.etcd, self.config.namespace)
        self.services: dict[str, Service] = {}
        self.url = ""
        self.http: httpx.AsyncClient

    @asynccontextmanager
    async def process(
        self, role: Role, index: int = 0, sim: dict[str, float] = SPEEDS
    ) -> AsyncIterator[Service]:
        """Leaving kills it, lease and all; a frontend stops in order, so that its socket leaves the event loop."""
        assert self.config.decode is not None
        decode = replace(self.config.decode, engine_args=engine_args(sim))
        config, slot = replace(self.config, decode=decode), Slot(role, index)
        module, _, name = service_of(role, config).partition(":")
        with serve_pages(config.host) as pages:
            service: Service = getattr(import_module(module), name).connect(config, slot, pages.metrics)
            pages.watched = service.watched
            life = asyncio.create_task(service.run())
            try:
                await until(lambda: service.ready.is_set() or life.done(), 60)
                self.services[slot.name] = service
                yield service
            finally:
                service.stop() if role is Role.FRONTEND else life.cancel()
                with suppress(asyncio.CancelledError):
                    await life

    def worker(self, name: str) -> EngineWorker:
        found = self.services[name]
        assert isinstance(found, EngineWorker)
        return found

    def engine(self, name: str) -> SimEngine:
        engine = self.worker(name)._engine
        assert isinstance(engine, SimEngine)
        return engine

    async def ask(self, prompt: list[int] = LONG, tokens: int = 3) -> httpx.Response:
        body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return await self.http.post("/v1/completions", json=body)

    @asynccontextmanager
    async def asked(self, prompt: list[int] = LONG, clients: int = 4) -> AsyncIterator[None]:
        """By so many clients, again and again, each prompt another one."""

        async def client(number: int) -> None:
            for turn in count():
                await self.ask([300 + number, 300 + turn, *prompt])

        async with Owner() as tasks:
            for number in range(clients):
                tasks.start(client(number), "client")
            yield

    async def forget_gone(self, workers: int) -> None:
        """As after `GONE_FOR`, when so many have vanished."""
        frontend = self.services["frontend-0"]
        assert isinstance(frontend, Frontend)
        await until(lambda: len(frontend._view.gone()) >= workers)
        frontend._view._gone.clear()

    async def tell(self, slot: SlotState) -> None:
        """As the supervisor of a process does."""
        await self.registry.put(keys.slot(slot), encode_record(slot))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def graph(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WatchedGraph]:
    graph = WatchedGraph(tmp_path_factory.mktemp("dashboard"))
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(dashboard, "KEPT", EVERY / 1000)
        await stack.enter_async_context(graph.registry)
        for role, index in ((Role.DECODE, 0), (Role.PREFILL, 0), (Role.PREFILL, 1)):
            await stack.enter_async_context(graph.process(role, index))
        frontend = await stack.enter_async_context(graph.process(Role.FRONTEND))
        assert isinstance(frontend, Frontend)
        graph.url = frontend._presence.instance.address
        graph.http = await stack.enter_async_context(httpx.AsyncClient(base_url=graph.url, timeout=30))

        async def healthy() -> bool:
            return (await graph.http.get("/health")).status_code == 200

        await until(healthy, 30)
        yield graph


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    found = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium: deploy/test-tools.sh installs it")
        pytest.skip("no Chromium here: deploy/test-tools.sh installs it")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        await browser.close()


class Visit:
    """A page that is open, and what it did that it must not do."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.errors: list[str] = []
        self.expected: tuple[str, ...] = ()
        """parts of errors that the test provokes"""
        page.on(
            "console", lambda message: self.errors.append(message.text) if message.type == "error" else None
        )
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._requested)

    def _requested(self, request: Request) -> None:
        if not request.url.startswith(self.url):
            self.errors.append(f"asked {request.url}")

    async def overflow(self) -> int:
        pixels: int = await self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return pixels

    async def says(self, text: str) -> None:
        await expect(self.page.locator("#problems")).to_contain_text(text)

    async def looks_again(self) -> None:
        """Wait until the page shows a state that was asked for after this call."""
        for _ in range(3):  # the first may be under way, and the third begins when the second is shown
            async with self.page.expect_response("**/dashboard/state"):
                pass


async def _hurry(route: Route) -> None:
    answer = await route.fetch()
    script = await answer.text()
    assert "const EVERY = 1000;" in script
    await route.fulfill(
        response=answer, body=script.replace("const EVERY = 1000;", f"const EVERY = {EVERY};")
    )


@asynccontextmanager
async def visiting(browser: Browser, url: str, **context: Any) -> AsyncIterator[Visit]:
    page = await browser.new_page(**{"viewport": {"width": 1440, "height": 900}, **context})
    visit = Visit(page, url)
    await page.route("**/dashboard.js", _hurry)
    await page.goto(f"{url}/dashboard")
    yield visit
    unexpected = [error for error in visit.errors if not any(part in error for part in visit.expected)]
    await page.close()
    assert unexpected == []


async def test_the_graph_is_drawn(graph: WatchedGraph, browser: Browser) -> None:
    answer = await graph.ask()
    async with visiting(browser, graph.url) as visit:
        page = visit.page
        await visit.says("All is well")
        for name in ("frontend-0", "decode-0", "prefill-0", "prefill-1"):
            await expect(page.locator(f"#graph svg .node[data-key='{name}']")).to_be_visible()
        await expect(page.locator("#graph .pill text")).to_have_text(["In line 0", "Prefill queue 0 of 2"])
        await expect(page.locator("#models")).to_have_text("demo")
        row = page.locator(f"#requests tr[data-key='{answer.headers['x-request-id']}']")
        await expect(row).to_contain_text("remote")
        await row.click()
        await expect(page.locator("#requests .timeline li b")).to_contain_text(
            ["admission", "queue", "prefill"]
        )
        await page.click("#filter button[value=failed]")
        await expect(page.locator("#requests")).to_contain_text("None of the recent requests")
        await page.focus("#charts [data-chart='0']")
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator("#charts figcaption").first).to_contain_text("ago")


async def test_a_killed_worker_is_seen(graph: WatchedGraph, browser: Browser) -> None:
    async with visiting(browser, graph.url) as visit:
        killed = SlotState("decode-1", Role.DECODE, graph.config.host, "ready")
        async with graph.process(Role.DECODE, 1):
            await graph.tell(killed)
            await expect(visit.page.locator("#graph .node.ok[data-key='decode-1']")).to_be_visible()
        await graph.tell(msgspec.structs.replace(killed, state="waiting to restart", end="killed by SIGKILL"))
        await visit.says("decode-1 is down: killed by SIGKILL; it will be started again")
        await expect(visit.page.locator("#graph .node.bad[data-key='decode-1']")).to_contain_text("down")
        await graph.registry.delete(keys.slot(killed))
        await visit.says("decode-1 of 127.0.0.1 is gone")
        await graph.forget_gone(1)
        await visit.says("All is well")


async def test_the_only_decode_worker_is_killed(
    tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests wait, and so do those that come; nothing on the page is blank, or says that they went elsewhere."""
    monkeypatch.setattr(dashboard, "KEPT", EVERY / 1000)
    graph = WatchedGraph(tmp_path)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(graph.registry)
        frontend = await stack.enter_async_context(graph.process(Role.FRONTEND))
        assert isinstance(frontend, Frontend)
        async with graph.process(Role.DECODE):
            graph.url = frontend._presence.instance.address
            graph.http = await stack.enter_async_context(httpx.AsyncClient(base_url=graph.url, timeout=30))
            await until(lambda: frontend._models.live() == {"demo": 1}, 30)
            lost = asyncio.create_task(graph.ask([310, 320], 3000))
            await until(lambda: any(each.output_tokens for each in frontend.receipts(9, None, "")))
        came = asyncio.create_task(graph.ask([330, 340]))
        async with visiting(browser, graph.url) as visit:
            await visit.says("decode-0 of 127.0.0.1 is gone")
            await visit.says("1 request waits for a worker")
            await visit.says("no decode worker is there")
            page = visit.page
            await expect(page.locator("#models")).to_have_text("demo")
            await expect(page.locator("#model")).to_have_value("demo")
            await expect(page.locator("#graph .pill text")).to_have_text(["In line 2"])
            rows = page.locator("#requests tbody tr")
            await expect(rows).to_have_count(2)
            await expect(rows.nth(0).locator("td").nth(2)).to_have_text("in line")
            await expect(rows.nth(0).locator("td").nth(5)).to_have_text("–")  # noqa: RUF001
            await expect(rows.nth(1).locator("td").nth(3)).to_have_text("local no-prefill-worker")
            await expect(page.locator("#detours")).to_contain_text("is gone")
        for each in (lost, came):
            each.cancel()
        await asyncio.gather(lost, came, return_exceptions=True)


async def test_a_full_queue_is_seen(graph: WatchedGraph, browser: Browser) -> None:
    engines = [graph.engine(name) for name in ("prefill-0", "prefill-1")]
    async with visiting(browser, graph.url) as visit, graph.asked(LONG * 10, clients=5):
        for engine in engines:
            engine.faults.going.clear()
        try:
            await visit.says("the prefill queue is full")
            await expect(visit.page.locator("#graph .pill.bad")).to_contain_text("of 2")
        finally:
            for engine in engines:
                engine.faults.going.set()


async def test_a_slow_link_is_seen(graph: WatchedGraph, browser: Browser) -> None:
    async with visiting(browser, graph.url) as visit, graph.process(Role.DECODE, 1, SLOW), graph.asked():
        await visit.says("to decode-1 is")
        await visit.says("times slower than over the other links")
        await expect(visit.page.locator("#graph .label.bad")).to_contain_text("kB/s")


async def test_a_chat_tells_where_it_was_prefilled(graph: WatchedGraph, browser: Browser) -> None:
    async with visiting(browser, graph.url) as visit:
        page = visit.page
        await expect(page.locator("#model")).to_have_value("demo")
        await page.fill("#max-tokens", "3500")
        await page.fill("#prompt", XSS)
        await page.press("#prompt", "Enter")
        await expect(page.locator(".question")).to_have_text(XSS)
        await expect(page.locator(".answer")).not_to_be_empty()
        await expect(page.locator("#stop")).to_be_visible()  # it still streams
        await page.click("#stop")
        await expect(page.locator(".about").first).to_contain_text("stopped")
        await page.fill("#prompt", "again")
        await page.click("#send")
        await expect(page.locator(".answer").nth(1)).not_to_be_empty()
        await page.click("#clear")  # while it streams
        await expect(page.locator("#send")).to_be_visible()
        await page.fill("#max-tokens", "4")
        await page.fill("#prompt", question := "And then? " * 20)
        async with page.expect_request("**/v1/chat/completions") as asked:
            await page.click("#send")
        body = json.loads((await asked.value).post_data or "")
        assert body["messages"] == [{"role": "user", "content": question.strip()}]
        about = page.locator(".about")
        await expect(about).to_contain_text("prefill remote (long)")
        await expect(about).to_contain_text("TTFT")
        await about.locator("summary").click()
        await expect(about.locator(".timeline")).to_contain_text("decode-0")


async def test_a_request_that_is_read_stays_under_load(graph: WatchedGraph, browser: Browser) -> None:
    answer = await graph.ask()
    request_id = answer.headers["x-request-id"]
    async with visiting(browser, graph.url) as visit:
        button = visit.page.locator(f"#requests [data-request='{request_id}']")
        await button.click()
        await visit.page.mouse.move(0, 0)
        await asyncio.gather(*(graph.ask() for _ in range(40)))
        await visit.looks_again()
        await expect(visit.page.locator("#requests .timeline")).to_be_visible()
        await expect(visit.page.locator("#held")).to_be_visible()
        await button.click()
        await visit.page.locator("#chat h2").click()
        await expect(button).to_have_count(0)
        await expect(visit.page.locator("#held")).to_be_hidden()


async def test_nothing_from_outside_becomes_markup(graph: WatchedGraph, browser: Browser) -> None:
    owner = graph.worker("decode-0").id
    card = keys.card(XSS, owner)
    await graph.registry.put(card, encode_record(ModelCard(XSS, XSS)))
    slot = SlotState(XSS, Role.PREFILL, "h", "stopped", end=XSS, cause=XSS)
    await graph.tell(slot)
    delta = {"choices": [{"delta": {"content": XSS}}]}

    async def answer(route: Route) -> None:
        body = f"data: {json.dumps(delta)}\n\ndata: {json.dumps({'error': {'message': XSS}})}\n\n"
        await route.fulfill(body=body, headers={"x-request-id": XSS, "x-pdserve-prefill": XSS})

    async with visiting(browser, graph.url) as visit:
        visit.expected = ("404",)  # the receipt
        page = visit.page
        await page.route("**/v1/chat/completions", answer)
        for _ in range(2):
            await graph.http.post("/v1/completions", json={}, headers={"x-request-id": "twice"})
        await visit.says(f"{XSS} is down: {XSS}")
        await expect(page.locator("#models")).to_contain_text(XSS)
        await page.fill("#prompt", "hello")
        await page.click("#send")
        await expect(page.locator(".answer")).to_have_text(XSS)
        await expect(page.locator(".about .bad")).to_have_text(XSS)
        assert await page.locator("img").count() == 0
        assert await page.evaluate("window.hacked") is None
        await expect(page.locator('#requests [data-request="twice"]')).to_have_count(2)
    await graph.registry.delete(card)
    await graph.registry.delete(keys.slot(slot))


async def test_on_a_phone_and_in_the_dark(graph: WatchedGraph, browser: Browser) -> None:
    await graph.ask()
    phone = {"width": 390, "height": 844}
    backgrounds = set()
    for scheme in ("light", "dark"):
        async with visiting(browser, graph.url, viewport=phone, color_scheme=scheme) as visit:
            await expect(visit.page.locator("#graph .tiles .node")).to_have_count(4)
            await visit.page.locator("#requests tbody tr").first.click()
            await expect(visit.page.locator(".timeline")).to_be_visible()
            assert await visit.overflow() == 0
            table, card = [await visit.page.locator(at).bounding_box() for at in (".requests", "#requests")]
            assert table
            assert card
            assert table["width"] <= card["width"]
            backgrounds.add(await visit.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2


async def test_a_large_graph_is_tiles(graph: WatchedGraph, browser: Browser) -> None:
    many = [Instance(f"prefill-{100 + index}-x", Role.PREFILL, "demo") for index in range(100)]
    for instance in many:
        await graph.registry.put(keys.instance(instance), encode_record(instance))
    async with visiting(browser, graph.url) as visit:
        await expect(visit.page.locator("#graph .tiles .node.bad")).to_have_count(100)
        await visit.says("does not answer")
        assert await visit.overflow() == 0
    for instance in many:
        await graph.registry.delete(keys.instance(instance))
    await graph.forget_gone(len(many))


async def test_a_frontend_that_is_away_is_said_and_comes_back(graph: WatchedGraph, browser: Browser) -> None:
    async with visiting(browser, graph.url) as visit:
        visit.expected = ("ERR_FAILED", "undefined")
        live = visit.page.locator("#live")
        await expect(live).to_contain_text("live")
        await visit.page.route("**/dashboard/state", lambda route: route.abort())
        await expect(live).to_contain_text("no answer")
        await visit.says("what is shown is what it told last")
        await expect(visit.page.locator("#problems")).not_to_contain_text("All is well")
        await visit.page.route("**/dashboard/state", lambda route: route.fulfill(json={}))
        await visit.looks_again()  # a state that it cannot show
        await visit.page.unroute_all()
        await expect(live).to_contain_text("live")
        await visit.says("All is well")


async def test_with_keys_the_page_asks_for_one(graph: WatchedGraph, browser: Browser) -> None:
    frontend = graph.services["frontend-0"]
    assert isinstance(frontend, Frontend)
    known = frontend._keys.keys
    known.replace([ApiKey.of("sk-alice-0123456789", "alice")])
    try:
        for path in SHELL:
            assert (await graph.http.get(path)).status_code == 200
        assert (await graph.http.get("/dashboard/state")).status_code == 401
        async with visiting(browser, graph.url) as visit:
            visit.expected = ("401",)
            page = visit.page
            await page.fill("#key-value", "sk-wrong-0123456789")
            await page.keyboard.press("Enter")
            await expect(page.locator("#ask-key-why")).to_contain_text("does not know this key")
            await page.fill("#key-value", "sk-alice-0123456789")
            await page.keyboard.press("Enter")
            await visit.says("All is well")
            await expect(page.locator("#requests")).to_have_text("No requests yet.")
            await page.fill("#prompt", "hello")
            await page.click("#send")
            await expect(page.locator("#requests tbody")).to_contain_text("alice")
            await expect(page.locator("#ask-key")).to_be_hidden()
            await page.click("#key")
            await expect(page.locator("#ask-key")).to_be_visible()
    finally:
        known.replace([])


async def test_the_page_lets_nothing_else_in(graph: WatchedGraph) -> None:
    for path in SHELL:
        headers = (await graph.http.get(path)).headers
        assert (
            "default-src 'none'; script-src 'self'; style-src 'self';" in headers["content-security-policy"]
        )
        assert headers["x-frame-options"] == "DENY"
    rebound = await graph.http.get("/dashboard/state", headers={"host": "evil.example"})
    assert rebound.status_code == 403


async def test_all_pages_share_a_look(graph: WatchedGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "KEPT", 60.0)
    looks = 0

    def watched() -> Watched:
        nonlocal looks
        looks += 1
        return Watched()

    frontend = graph.services["frontend-0"]
    assert isinstance(frontend, Frontend)
    page = Dashboard(replace(frontend._ribs.context, watched=watched))
    states = await asyncio.gather(*(page.state(Viewer()) for _ in range(20)))
    assert looks == len(set(states)) == 1


async def test_a_key_sees_what_is_its_own() -> None:
    frontend = Instance("frontend-0-x", Role.FRONTEND, address="http://secret", host="secret", pid=7)
    link = LinkState("decode-0-x", "requests", up=False, failures=1, failure="secret:1234 refused")
    receipts = [Receipt(name, frontend.id, "/", 1.0, key=name) for name in ("alice", "bob")]
    slot = SlotState("decode-0", Role.DECODE, "secret", "stopped", end="exit code 1", cause="/secret/path")
    watched = Watched(links=[link], receipts=receipts, outages=[Outage("etcd", "secret:2379", 1.0)])
    state = graph_state([frontend], [slot], {}, {}, {frontend.id: watched})
    own = told(state, Viewer("alice", everything=False), frontend.id, 0.0, "demo")
    assert [receipt.key for receipt in own.receipts] == ["alice"]
    assert "secret" not in str(own)
    everything = told(state, Viewer("admin"), frontend.id, 0.0, "demo")
    assert [receipt.key for receipt in everything.receipts] == ["alice", "bob"]
    assert "secret" in str(everything)


async def test_of_very_many_links_those_in_trouble_are_told() -> None:
    links = [LinkState(f"prefill-{index}-x", "kv", up=index != 700) for index in range(1000)]
    decode = Instance("decode-0-x", Role.DECODE)
    state = graph_state([decode], [], {}, {}, {decode.id: Watched(links=links)})
    (node,) = told(state, Viewer(), "frontend-0-x", 0.0, "demo").nodes
    assert len(node.links) == 400
    assert not node.links[0].up
