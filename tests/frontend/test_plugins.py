"""Plugins can be left out, and their errors reach no client."""

import httpx
import pytest
from starlette.requests import Request

from pdserve.config.api_keys import ApiKey
from pdserve.contract.messages import Load
from pdserve.contract.reports import ProcessReport, Receipt
from pdserve.frontend.app import FrontendApp
from pdserve.frontend.edge.request_record import RequestRecord
from pdserve.frontend.edge.request_state import RequestState
from pdserve.frontend.keys.auth import ApiKeys
from pdserve.frontend.observability.receipts import Receipts
from pdserve.frontend.plugins import Plugin, PluginContext, Plugins
from tests.frontend.conftest import Graph
from tests.frontend.test_generate import chat, completion

pytestmark = pytest.mark.asyncio(loop_scope="session")

OWN_ID = {"x-request-id": "the-same"}
TIMED = ("server-timing", "content-length")


def client(app: FrontendApp, address: str = "127.0.0.1") -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, client=(address, 1)), base_url="http://127.0.0.1"
    )


def comparable(answer: httpx.Response) -> tuple[int, dict[str, str], list[str]]:
    """Return the response without its time of creation and its durations."""
    headers = {name: value for name, value in answer.headers.items() if name not in TIMED}
    fields = answer.text.replace("\n", ",").split(",")
    return answer.status_code, headers, [field for field in fields if '"created"' not in field]


ASKED = [
    ("/v1/completions", completion()),
    ("/v1/completions", completion(stream=True)),
    ("/v1/completions", completion(temperature=-1)),
    ("/v1/completions", completion(model="other")),
    ("/v1/chat/completions", chat()),
    ("/tokenize", {"model": "demo", "prompt": "Hi"}),
]


async def test_without_plugins_requests_are_answered_identically(graph: Graph) -> None:
    async with (
        graph.worker(),
        client(graph.app_with(ApiKeys())) as with_plugins,
        client(graph.app_with(ApiKeys(), plugins=())) as bare,
    ):
        for path, body in ASKED:
            expected = comparable(await with_plugins.post(path, json=body, headers=OWN_ID))
            assert comparable(await bare.post(path, json=body, headers=OWN_ID)) == expected
        assert [model["id"] for model in (await bare.get("/v1/models")).json()["data"]] == ["demo"]
        for path in ("/health", "/metrics", "/requests", "/dashboard", "/load", "/version"):
            assert (await bare.get(path)).status_code == 404


class Broken(Plugin):
    def begin(self, request: Request, state: RequestState) -> None:
        raise RuntimeError("begin")

    def end(self, record: RequestRecord) -> None:
        raise RuntimeError("end")

    def add_to_report(self, report: ProcessReport) -> ProcessReport:
        raise RuntimeError("add_to_report")

    def receipts(self, limit: int, key: str | None, request_id: str) -> list[Receipt]:
        raise RuntimeError("receipts")


async def test_an_error_of_a_plugin_reaches_no_client_and_no_other_plugin(
    graph: Graph, caplog: pytest.LogCaptureFixture
) -> None:
    plugins = Plugins(graph.context, [Broken(graph.context), Receipts(graph.context)])
    app = FrontendApp(graph.models, ApiKeys(), plugins, 20.0)
    async with graph.worker(), client(app) as http:
        assert (await http.post("/v1/completions", json=completion(), headers=OWN_ID)).status_code == 200
    assert [receipt.request_id for receipt in plugins.receipts(1)] == ["the-same"]
    assert plugins.add_to_report(ProcessReport(Load(running=1))).load.running == 1
    for call in ("begin", "end", "add_to_report", "receipts"):
        assert f"RuntimeError: {call}" in caplog.text


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3"])
async def test_pages_that_need_no_key(graph: Graph, address: str) -> None:
    needs_none = {"/health", "/ping", "/dashboard", "/dashboard/dashboard.js"}
    needs_none_here = {"/load", "/version", "/metrics"}
    needs_one = {"/requests", "/dashboard/state", "/v1/models", "/openapi.json", "/docs", "/nowhere"}
    async with graph.worker(), client(graph.app_with(ApiKeys([ApiKey.of("secret")])), address) as http:
        paths = needs_none | needs_none_here | needs_one
        answers = {path: await http.get(path) for path in paths}
        strangers = (await http.get("/health")).json()
        known = (await http.get("/health", headers={"x-api-key": "secret"})).json()
    assert (strangers.keys() == {"status"}) is (address != "127.0.0.1")
    assert known["workers"]["demo"] == 1
    schemes = {
        path: answer.headers["www-authenticate"]
        for path, answer in answers.items()
        if answer.status_code == 401
    }
    needs_one |= set() if address == "127.0.0.1" else needs_none_here
    assert schemes == dict.fromkeys(needs_one, "Bearer")


class Kept(Plugin):
    def __init__(self, context: PluginContext) -> None:
        self.records: list[RequestRecord] = []

    def end(self, record: RequestRecord) -> None:
        self.records.append(record)


async def test_each_request_to_a_model_has_one_record(graph: Graph) -> None:
    kept = Kept(graph.context)
    app = FrontendApp(graph.models, ApiKeys([ApiKey.of("secret")]), Plugins(graph.context, [kept]), 20.0)
    async with graph.worker(), client(app) as http:
        await http.post("/v1/completions", json=completion())
        http.headers["authorization"] = "Bearer secret"
        await http.post("/v1/completions", json=completion())
        await http.post("/tokenize", json={"model": "demo", "prompt": "Hi"})
        await http.get("/v1/models")
    seen = [(record.receipt.path, record.code, record.begun) for record in kept.records]
    assert seen == [
        ("/v1/completions", 401, False),
        ("/v1/completions", 200, True),
        ("/tokenize", 200, False),
    ]
    assert graph.context.running == {}
