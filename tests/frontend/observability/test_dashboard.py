"""`/dashboard` in headless Chromium shows a frontend with an `EchoWorker`, or made-up states of graphs.
`tests/observe/test_problems.py` tests which problems are found."""

import asyncio
import dataclasses
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace
from playwright.async_api import Browser, Page, Request, Route, async_playwright, expect

from pdserve.config.api_keys import ApiKey
from pdserve.contract.messages import Hop, Load
from pdserve.contract.records import Instance, ModelCard, Role, SlotState, encode_record
from pdserve.contract.reports import LinkState, LostProcess, Outage, ProcessReport, Receipt
from pdserve.frontend.keys.auth import Viewer
from pdserve.frontend.observability.dashboard import page as dashboard
from pdserve.frontend.observability.dashboard.page import SHELL, Dashboard, shown_to
from pdserve.observe.graph_state import GraphState, InstanceState, graph_state
from pdserve.observe.process_pages import serve_pages
from pdserve.registry import keys
from tests.frontend.conftest import Graph, running_graph
from tests.memory.registry import MemoryRegistry
from tests.observe.graph_states import NOW, SLOW, instance, loaded

pytestmark = pytest.mark.asyncio(loop_scope="module")

XSS = '<img src=x onerror="window.hacked = 1">'
EVERY = 200
"""milliseconds between two polls of the page, and between two reads of the graph by the frontend"""
expect.set_options(timeout=30_000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def graph(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Graph]:
    """Yield a graph whose decode worker has a metrics page, as real ones have."""
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(dashboard, "KEPT", EVERY / 1000)
        graph = await stack.enter_async_context(running_graph(tmp_path_factory.mktemp("state")))
        pages = stack.enter_context(serve_pages("127.0.0.1"))
        worker = await stack.enter_async_context(graph.worker(pace=0.005, metrics=pages.metrics))
        worker.placed = replace(worker.placed, hops=[Hop("prefill", 1e-6, 1e-6)])
        registry = await stack.enter_async_context(MemoryRegistry(graph.registry))
        me = Instance(graph.id, Role.FRONTEND)
        await registry.put(keys.instance(me), encode_record(me))
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
    """A page that is open in the browser, and the page's errors."""

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

    async def draws(self, state: GraphState) -> None:
        """Show this state from now on, in place of the frontend's."""
        found = encode_record(shown_to(state, Viewer(), "frontend-0-aa", NOW, "demo"))
        await self.page.unroute("**/dashboard/state")
        await self.page.route("**/dashboard/state", lambda route: route.fulfill(body=found))
        await self.looks_again()

    async def says(self, text: str) -> None:
        await expect(self.page.locator("#problems")).to_contain_text(text)

    async def looks_again(self) -> None:
        """Wait until the page shows a state that was asked for after this call."""
        # the first response may be to an earlier request; the third request comes once the second response is shown
        for _ in range(3):
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
async def visiting(browser: Browser, graph: Graph, **context: Any) -> AsyncIterator[Visit]:
    page = await browser.new_page(**{"viewport": {"width": 1440, "height": 900}, **context})
    url = graph.url
    visit = Visit(page, url)
    await page.route("**/dashboard.js", _hurry)
    await page.goto(f"{url}/dashboard")
    yield visit
    unexpected = [error for error in visit.errors if not any(part in error for part in visit.expected)]
    await page.close()
    assert unexpected == []


WELL = replace(loaded(), receipts=[SLOW])


async def test_a_real_graph_is_drawn_with_its_requests(graph: Graph, browser: Browser) -> None:
    body = {"model": "demo", "prompt": [300, 310], "max_tokens": 3}
    answer = await graph.http.post("/v1/completions", json=body)
    async with visiting(browser, graph) as visit:
        page = visit.page
        await visit.says("All is well")
        for name in ("frontend-0", "decode-0"):
            await expect(page.locator(f"#graph svg .node.ok[data-key='{name}']")).to_be_visible()
        await expect(page.locator("#models")).to_have_text("demo")
        row = page.locator(f"#requests tr[data-key='{answer.headers['x-request-id']}']")
        await expect(row).to_contain_text("local")
        await row.click()
        await expect(page.locator("#requests .timeline li b")).to_contain_text(
            ["admission", "prefill", "decode"]
        )


async def test_the_page_draws_processes_queues_requests_and_charts(graph: Graph, browser: Browser) -> None:
    async with visiting(browser, graph) as visit:
        page = visit.page
        await visit.draws(WELL)
        await visit.says("All is well")
        for node in WELL.instances:
            name = node.instance.id.rpartition("-")[0]
            await expect(page.locator(f"#graph svg .node.ok[data-key='{name}']")).to_be_visible()
        await expect(page.locator("#graph .pill text")).to_have_text(["In line 0", "Prefill queue 1 of 10"])
        await expect(page.locator("#requests tbody")).to_contain_text("remote")
        await page.click("#filter button[value=failed]")
        await expect(page.locator("#requests")).to_contain_text("None of the recent requests")
        await page.focus("#charts [data-chart='0']")
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator("#charts figcaption").first).to_contain_text("ago")


async def test_with_two_models_each_is_named(graph: Graph, browser: Browser) -> None:
    other = replace(instance("decode-2-x", 12), model="other")
    state = replace(WELL, instances=[*WELL.instances, InstanceState(other, Load(), [])])
    async with visiting(browser, graph) as visit:
        page = visit.page
        await visit.draws(state)
        await expect(page.locator("#graph .node[data-key='decode-2']")).to_contain_text("other · 0 running")
        await expect(page.locator("#charts figcaption").first).to_contain_text("(demo and other)")
        await expect(page.locator("#requests tbody tr").first).to_contain_text("demo")
        await visit.draws(WELL)
        await expect(page.locator("#charts figcaption").first).not_to_contain_text("demo")


@pytest.mark.parametrize(
    ("state", "problem", "place", "text"),
    [
        (
            loaded(down=True),
            "decode-1 is down: killed by SIGKILL; it will be started again",
            ".node.bad[data-key='decode-1']",
            "down",
        ),
        (loaded(full=True), "the prefill queue is full", ".pill.bad", "10 of 10"),
        (loaded(slow=True), "400 times slower than over the other links", ".label.bad", "MB/s"),
    ],
    ids=["a process that is down", "a full queue", "a slow link"],
)
async def test_a_problem_is_shown_and_marked_in_the_graph(
    graph: Graph, browser: Browser, state: GraphState, problem: str, place: str, text: str
) -> None:
    async with visiting(browser, graph) as visit:
        await visit.draws(state)
        await visit.says(problem)
        await expect(visit.page.locator(f"#graph {place}").first).to_contain_text(text)
        await visit.draws(WELL)
        await visit.says("All is well")
        await expect(visit.page.locator(f"#graph {place}")).to_have_count(0)


async def test_without_a_decode_worker_nothing_is_blank(graph: Graph, browser: Browser) -> None:
    """The lost worker's request waits, and so does a newer one."""
    hops = [Hop("migration", 3.0, 0.0, "decode-0-cc", "decode-0-cc is gone"), Hop("admission", 3.0, 6.0)]
    lost = Receipt("lost", "frontend-0-aa", "/v1/completions", 9.0, 9.0, running=True, prompt_tokens=2)
    lost = replace(lost, prefill="local", reason="local-no-prefill-worker", hops=hops)
    came = Receipt("came", "frontend-0-aa", "/v1/completions", 1.0, 1.0, running=True)
    came = replace(came, hops=[Hop("admission", 0.0, 1.0)])
    gone = [LostProcess("decode-0-cc", "127.0.0.1", 3.0)]
    reported = ProcessReport(Load(waiting=2), receipts=[came, lost], gone=gone)
    state = graph_state([instance("frontend-0-aa", 1)], [], {}, {}, {"frontend-0-aa": reported})
    async with visiting(browser, graph) as visit:
        page = visit.page
        await visit.draws(state)
        await visit.says("decode-0 of 127.0.0.1 is gone")
        await visit.says("1 request migrated")
        await visit.says("no decode worker is available")
        await expect(page.locator("#models")).to_have_text("demo")
        await expect(page.locator("#model")).to_have_value("demo")
        await expect(page.locator("#graph .pill text")).to_have_text(["In line 2"])
        rows = page.locator("#requests tbody tr")
        await expect(rows).to_have_count(2)
        await expect(rows.nth(0).locator("td").nth(2)).to_have_text("in line")
        await expect(rows.nth(0).locator("td").nth(5)).to_have_text("–")  # noqa: RUF001
        await expect(rows.nth(1).locator("td").nth(3)).to_have_text("local no-prefill-worker")
        await expect(page.locator("#detours")).to_contain_text("is gone")


async def test_a_chat_shows_where_it_was_prefilled(graph: Graph, browser: Browser) -> None:
    async with visiting(browser, graph) as visit:
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
        await page.click("#clear")  # while the answer streams
        await expect(page.locator("#send")).to_be_visible()
        await page.fill("#max-tokens", "4")
        await page.fill("#prompt", question := "And then? " * 20)
        async with page.expect_request("**/v1/chat/completions") as asked:
            await page.click("#send")
        body = json.loads((await asked.value).post_data or "")
        assert body["messages"] == [{"role": "user", "content": question.strip()}]
        about = page.locator(".about")
        await expect(about).to_contain_text("prefill local")
        await expect(about).to_contain_text("TTFT")
        await about.locator("summary").click()
        await expect(about.locator(".timeline")).to_contain_text("decode-0")


async def test_an_expanded_request_stays_while_others_come(graph: Graph, browser: Browser) -> None:
    others = [replace(SLOW, request_id=f"other-{number}") for number in range(40)]
    async with visiting(browser, graph) as visit:
        await visit.draws(WELL)
        button = visit.page.locator(f"#requests [data-request='{SLOW.request_id}']")
        await button.click()
        await visit.page.mouse.move(0, 0)
        await visit.draws(replace(WELL, receipts=others))
        await expect(visit.page.locator("#requests .timeline")).to_be_visible()
        await expect(visit.page.locator("#held")).to_be_visible()
        await button.click()
        await visit.page.locator("#chat h2").click()
        await expect(button).to_have_count(0)
        await expect(visit.page.locator("#held")).to_be_hidden()


async def test_nothing_from_outside_becomes_markup(graph: Graph, browser: Browser) -> None:
    slot = SlotState(XSS, Role.PREFILL, "h", "stopped", end=XSS, cause=XSS)
    twice = [replace(SLOW, request_id="twice", error=XSS)] * 2
    state = replace(WELL, slots=[slot], cards={XSS: [("decode-0-cc", ModelCard(XSS, XSS))]}, receipts=twice)
    delta = {"choices": [{"delta": {"content": XSS}}]}

    async def answer(route: Route) -> None:
        body = f"data: {json.dumps(delta)}\n\ndata: {json.dumps({'error': {'message': XSS}})}\n\n"
        await route.fulfill(body=body, headers={"x-request-id": XSS, "x-pdserve-prefill": XSS})

    async with visiting(browser, graph) as visit:
        visit.expected = ("404",)  # there is no receipt of this id
        page = visit.page
        await page.route("**/v1/chat/completions", answer)
        await visit.draws(state)
        await visit.says(f"{XSS} is down: {XSS}")
        await expect(page.locator("#models")).to_contain_text(XSS)
        await page.fill("#prompt", "hello")
        await page.click("#send")
        await expect(page.locator(".answer")).to_have_text(XSS)
        await expect(page.locator(".about .bad")).to_have_text(XSS)
        assert await page.locator("img").count() == 0
        assert await page.evaluate("window.hacked") is None
        await expect(page.locator('#requests [data-request="twice"]')).to_have_count(2)


async def test_the_page_fits_a_phone_and_has_a_dark_scheme(graph: Graph, browser: Browser) -> None:
    phone = {"width": 390, "height": 844}
    backgrounds = set()
    for scheme in ("light", "dark"):
        async with visiting(browser, graph, viewport=phone, color_scheme=scheme) as visit:
            await visit.draws(WELL)
            await expect(visit.page.locator("#graph .tiles .node")).to_have_count(6)
            await visit.page.locator("#requests tbody tr").first.click()
            await expect(visit.page.locator(".timeline")).to_be_visible()
            assert await visit.overflow() == 0
            table, card = [await visit.page.locator(at).bounding_box() for at in (".requests", "#requests")]
            assert table
            assert card
            assert table["width"] <= card["width"]
            backgrounds.add(await visit.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2


async def test_a_large_graph_is_drawn_as_tiles(graph: Graph, browser: Browser) -> None:
    silent = [instance(f"prefill-{100 + index}-x", index) for index in range(100)]
    state = graph_state([*(each.instance for each in WELL.instances), *silent], [], {}, {}, {})
    async with visiting(browser, graph) as visit:
        await visit.draws(state)
        await expect(visit.page.locator("#graph .tiles .node.bad")).to_have_count(106)
        await visit.says("does not answer")
        assert await visit.overflow() == 0


async def test_a_frontend_that_does_not_answer_is_shown_until_it_does(graph: Graph, browser: Browser) -> None:
    async with visiting(browser, graph) as visit:
        visit.expected = ("ERR_FAILED", "undefined")
        live = visit.page.locator("#live")
        await expect(live).to_contain_text("live")
        await visit.page.route("**/dashboard/state", lambda route: route.abort())
        await expect(live).to_contain_text("no answer")
        await visit.says("the page shows its last state")
        await expect(visit.page.locator("#problems")).not_to_contain_text("All is well")
        await visit.page.route("**/dashboard/state", lambda route: route.fulfill(json={}))
        await visit.looks_again()  # the page cannot show this state
        await visit.page.unroute_all()
        await expect(live).to_contain_text("live")
        await visit.says("All is well")


async def test_with_keys_the_page_asks_for_a_key(graph: Graph, browser: Browser) -> None:
    known = graph.context.keys
    known.replace([ApiKey.of("sk-alice-0123456789", "alice")])
    try:
        for path in SHELL:
            assert (await graph.http.get(path)).status_code == 200
        assert (await graph.http.get("/dashboard/state")).status_code == 401
        async with visiting(browser, graph) as visit:
            visit.expected = ("401",)
            page, entered = visit.page, asyncio.Event()

            async def late(route: Route) -> None:
                await entered.wait()
                await route.fulfill(status=401, json={})

            await page.fill("#key-value", "sk-wrong-0123456789")
            async with page.expect_request("**/dashboard/state"):
                await page.route("**/dashboard/state", late)
            await page.keyboard.press("Enter")
            await page.unroute("**/dashboard/state", late)
            entered.set()  # a late 401, to a request sent without this key, is ignored
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


async def test_the_page_loads_nothing_from_elsewhere(graph: Graph) -> None:
    for path in SHELL:
        headers = (await graph.http.get(path)).headers
        assert (
            "default-src 'none'; script-src 'self'; style-src 'self';" in headers["content-security-policy"]
        )
        assert headers["x-frame-options"] == "DENY"


async def test_all_open_pages_share_one_reading_of_the_graph(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "KEPT", 60.0)
    looks = 0

    def report() -> ProcessReport:
        nonlocal looks
        looks += 1
        return ProcessReport()

    page = Dashboard(dataclasses.replace(graph.context, report=report))
    states = await asyncio.gather(*(page.state(Viewer()) for _ in range(20)))
    assert looks == len(set(states)) == 1


async def test_a_key_sees_only_its_own_receipts_and_no_addresses() -> None:
    frontend = Instance("frontend-0-x", Role.FRONTEND, address="http://secret", host="secret", pid=7)
    link = LinkState("decode-0-x", "requests", up=False, failures=1, failure="secret:1234 refused")
    receipts = [Receipt(name, frontend.id, "/", 1.0, key=name) for name in ("alice", "bob")]
    slot = SlotState("decode-0", Role.DECODE, "secret", "stopped", end="exit code 1", cause="/secret/path")
    watched = ProcessReport(links=[link], receipts=receipts, outages=[Outage("etcd", "secret:2379", 1.0)])
    state = graph_state([frontend], [slot], {}, {}, {frontend.id: watched})
    own = shown_to(state, Viewer("alice", everything=False), frontend.id, 0.0, "demo")
    assert [receipt.key for receipt in own.receipts] == ["alice"]
    assert "secret" not in str(own)
    everything = shown_to(state, Viewer("admin"), frontend.id, 0.0, "demo")
    assert [receipt.key for receipt in everything.receipts] == ["alice", "bob"]
    assert "secret" in str(everything)


async def test_of_1000_links_400_are_shown_and_broken_ones_first() -> None:
    links = [LinkState(f"prefill-{index}-x", "kv", up=index != 700) for index in range(1000)]
    decode = Instance("decode-0-x", Role.DECODE)
    state = graph_state([decode], [], {}, {}, {decode.id: ProcessReport(links=links)})
    (node,) = shown_to(state, Viewer(), "frontend-0-x", 0.0, "demo").nodes
    assert len(node.links) == 400
    assert not node.links[0].up
