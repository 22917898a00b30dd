"""Batches, as OpenAI's client sees them, with a decode worker without an engine (`EchoWorker`)."""

import asyncio
import json
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Batch
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.config.api_keys import ApiKey, KeyLimits
from pdserve.config.schema import FrontendConfig
from pdserve.contract.slo import FLEX_PREFIX
from pdserve.frontend.app import FrontendApp
from pdserve.frontend.batches import routes, runner, store
from pdserve.frontend.edge import body as bodies
from pdserve.frontend.keys.auth import ApiKeys
from pdserve.frontend.plugins import Plugins
from tests.conditions import until
from tests.frontend.conftest import Graph, address_of, serve
from tests.full_disk import small_disk

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT: Final = "/v1/chat/completions"
KEYS = [ApiKey.of(f"sk-{name}-0123456789", name) for name in ("ann", "bob", "lock")]


def chat(custom_id: str, *, url: str = CHAT, **changes: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": custom_id}], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body | changes}


def jsonl(*lines: object) -> bytes:
    return b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)


class Served:
    """A frontend with batches, and its clients by key name."""

    def __init__(self, graph: Graph, folder: Path, keys: list[ApiKey]) -> None:
        self.drains = False
        self.faults: dict[str, Exception | ASGIApp] = {}
        """by custom_id: the app that answers the line in place of the frontend's, or the exception that is raised"""
        self.statuses = Counter[int]()
        """responses to lines, by status"""
        config = FrontendConfig(batches=folder)
        self.context = replace(
            graph.context,
            keys=ApiKeys(keys),
            running={},
            app=lambda: self._line,
            config=config,
            draining=lambda: self.drains,
        )
        plugins = Plugins.load(self.context)
        self.app, self.plugin = (
            FrontendApp(graph.models, self.context.keys, plugins, 20.0),
            plugins.plugins[-1],
        )
        self.url = ""
        self.clients: dict[str, AsyncOpenAI] = {}

    async def _line(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await receive()
        name = re.search(r'"content": "([^"]*)', first["body"].decode())
        if isinstance(fault := self.faults.get(name[1] if name else ""), Exception):
            raise fault
        taken = [first]

        async def counted(message: Message) -> None:
            self.statuses[message.get("status", 0)] += 1
            await send(message)

        async def again() -> Message:
            return taken.pop() if taken else await receive()

        await (fault or self.app)(scope, again, counted)

    def client(self, name: str = "ann") -> AsyncOpenAI:
        if name not in self.clients:
            key = f"sk-{name}-0123456789"
            self.clients[name] = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
        return self.clients[name]

    async def begin(self, *lines: object, name: str = "ann") -> Batch:
        client = self.client(name)
        file = await client.files.create(file=("input.jsonl", jsonl(*lines)), purpose="batch")
        return await self.create(file.id, name)

    async def create(self, file_id: str, name: str = "ann") -> Batch:
        return await self.client(name).batches.create(
            input_file_id=file_id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
        )

    async def end(self, batch: Batch, name: str = "ann", done: int | None = None) -> Batch:
        """Wait until the batch has ended or, given `done`, until that many of its lines have."""
        for _ in range(600):
            batch = await self.client(name).batches.retrieve(batch.id)
            counts = batch.request_counts
            if batch.status not in ("validating", "in_progress", "cancelling") or (
                counts and counts.completed + counts.failed == done
            ):
                return batch
            await asyncio.sleep(0.05)
        raise AssertionError(batch)

    async def results(self, file_id: str | None, name: str = "ann") -> dict[str, dict[str, Any]]:
        """Return the file's lines by `custom_id`, each of which must occur once."""
        text = (await self.client(name).files.content(file_id)).text if file_id else ""
        lines = [json.loads(line) for line in text.splitlines()]
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines)
        return found


@asynccontextmanager
async def served(graph: Graph, folder: Path, keys: list[ApiKey] = KEYS) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        one = Served(graph, folder, keys)
        one.url = await serve(one.app, stack)
        working = asyncio.ensure_future(one.plugin.work["batches"]())
        try:
            yield one
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            for client in one.clients.values():
                await client.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {
        "POLL_INTERVAL": 0.05,
        "MAX_PAUSE": 0.05,
        "UNKNOWN_MODEL_SECONDS": 0.2,
        "WINDOW_STEP": 0.1,
        "RERUN_DELAY": 0.5,
    }.items():
        monkeypatch.setattr(runner, name, seconds)
    connect = sqlite3.connect

    def beside_the_loop(*args: Any, **options: Any) -> object:
        assert threading.current_thread() is not threading.main_thread()
        return connect(*args, **options)

    monkeypatch.setattr(sqlite3, "connect", beside_the_loop)


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o077 for path in folder.rglob("*")}


async def test_a_batch_from_upload_to_results(graph: Graph, tmp_path: Path) -> None:
    (foreign := tmp_path / "lost+found").mkdir()
    async with graph.worker() as worker, served(graph, tmp_path) as one:
        for name in ("ann", "lock"):
            lines = chat("a"), chat("b"), chat("c", max_tokens=-1), chat("d", model="none")
            batch = await one.begin(*lines, name=name)
            assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
            batch = await one.end(batch, name)
            assert batch.status == "completed"
            assert batch.request_counts is not None
            assert batch.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
            good = await one.results(batch.output_file_id, name)
            bad = await one.results(batch.error_file_id, name)
            assert {line["response"]["status_code"] for line in good.values()} == {200}
            assert good["a"]["response"]["body"]["choices"][0]["message"]["content"]
            assert {name: line["response"]["status_code"] for name, line in bad.items()} == {
                "c": 400,
                "d": 404,
            }
            assert list(good) == ["a", "b"]
        assert {submit.client[:1] for submit in worker.seen} == {FLEX_PREFIX}
    assert not list(foreign.iterdir())
    assert modes(tmp_path / "data") == {0}


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([chat("a"), b"{nothing\n"], "invalid_json_line", 2),
        ([{"custom_id": "a"}], "invalid_json_line", 1),
        ([{**chat("a"), "method": "GET"}], "invalid_json_line", 1),
        ([chat("")], "duplicate_custom_id", 1),
        ([chat("a"), chat("b"), chat("a")], "duplicate_custom_id", 3),
        ([chat("a", url="/v1/completions")], "mismatched_endpoint", 1),
        ([chat("a", stream=True)], "invalid_request", 1),
        ([], "invalid_input_file", None),
        ([chat("a"), chat("b"), chat("c"), chat("d")], "invalid_input_file", None),
        ([chat("a", stop="x" * 2000)], "invalid_json_line", 1),
        ([chat("a"), chat("b", stop=[[]] * 11)], "invalid_json_line", 2),
        ([json.dumps(chat("a")).encode().ljust(1500), chat("b")], "invalid_json_line", 1),
        ([chat("a"), b"\n"], "invalid_json_line", 2),
        ([json.dumps(chat("a")).encode() + b"\r\n", b'{"custom_id": "\xff"}'], "invalid_json_line", 2),
    ],
)
async def test_a_batch_with_bad_lines_fails_and_sends_no_line(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[object], code: str, number: int
) -> None:
    monkeypatch.setattr(store, "MAX_LINES", 3)
    monkeypatch.setattr(store, "MAX_LINE", 1500)
    monkeypatch.setattr(bodies, "MAX_PARTS", 10)
    async with graph.worker() as worker, served(graph, tmp_path) as one:
        batch = await one.end(await one.begin(*lines))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
    assert not worker.seen


async def test_another_key_finds_nothing(graph: Graph, tmp_path: Path) -> None:
    async with graph.worker(), served(graph, tmp_path) as one:
        batch = await one.end(await one.begin(chat("a")))
        bob = one.client("bob")
        for ask in (
            bob.batches.retrieve(batch.id),
            bob.batches.cancel(batch.id),
            bob.files.retrieve(batch.input_file_id),
            bob.files.content(str(batch.output_file_id)),
            bob.files.delete(batch.input_file_id),
            bob.files.retrieve("../ann/files/" + batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await ask
        with pytest.raises(openai.BadRequestError):
            await one.create(batch.input_file_id, "bob")
        assert not (await bob.files.list()).data
        assert not (await bob.batches.list()).data
        with pytest.raises(openai.AuthenticationError):
            await one.client("eve").batches.list()


async def test_lists_have_pages(graph: Graph, tmp_path: Path) -> None:
    async with graph.worker(), served(graph, tmp_path) as one:
        made = [(await one.begin(chat("a"))).id for _ in range(5)]
        client = one.client()
        first = await client.batches.list(limit=2)
        assert (len(first.data), first.has_more) == (2, True)
        assert sorted([batch.id async for batch in client.batches.list(limit=2)]) == sorted(made)
        for batch_id in made:
            await one.end(await client.batches.retrieve(batch_id))
        files = await client.files.list(purpose="batch", order="asc")
        assert len(files.data) == 5
        await client.files.delete(files.data[0].id)
        with pytest.raises(openai.NotFoundError):
            await client.files.content(files.data[0].id)
        for wrong in ({"limit": 0}, {"limit": "000000001" + "9" * 5000}, {"after": "batch_none"}):
            with pytest.raises(openai.BadRequestError):
                await client.batches.list(**wrong)


async def test_closed_batches_beyond_the_bound_are_forgotten(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_CLOSED", 2)
    async with served(graph, tmp_path) as one:
        made = [(await one.end(await one.begin(b"nothing"))).id for _ in range(4)]
        assert [batch.id for batch in (await one.client().batches.list()).data] == made[:0:-1]


@pytest.mark.parametrize("metadata", [{"a" * 65: ""}, {"a": "b" * 513}, {str(n): "" for n in range(17)}])
async def test_metadata_has_the_bounds_of_openai(
    graph: Graph, tmp_path: Path, metadata: dict[str, str]
) -> None:
    async with served(graph, tmp_path) as one:
        file = await one.client().files.create(file=("f", b"x"), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="length"):
            await one.client().batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata=metadata
            )


@pytest.mark.parametrize("ends", ["cancelled", "expired"])
async def test_lines_stop_when_the_batch_is_cancelled_or_expires(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    async with graph.worker(pace=None) as worker, served(graph, tmp_path) as one:
        batch = await one.begin(chat("a"), chat("b"))
        await worker.until(lambda: len(worker.jobs) == 2)
        if ends == "expired":
            monkeypatch.setattr(runner, "WINDOW_STEP", store.WINDOW)
        else:
            waiting = await one.begin(chat("c"))
            for each in (waiting, batch):
                assert (await one.client().batches.cancel(each.id)).status == "cancelling"
                assert (await one.end(each)).status == ends
        batch = await one.end(batch)
        assert batch.status == ends
        await worker.until(lambda: not worker.jobs)
        with pytest.raises(openai.BadRequestError):
            await one.client().batches.cancel(batch.id)
        errors = await one.results(batch.error_file_id)
        assert {line["error"]["code"] for line in errors.values()} == (
            {"batch_expired"} if ends == "expired" else set()
        )


@pytest.mark.parametrize("drains", [True, False])
async def test_another_frontend_continues_a_batch_where_the_first_stopped(
    graph: Graph, tmp_path: Path, drains: bool
) -> None:
    async with graph.worker(at_once=2) as worker, served(graph, tmp_path) as two:
        async with served(graph, tmp_path) as one:
            batch = await two.begin(*(chat(f"line {number}") for number in range(60)))
            await until(lambda: one.statuses[200] + two.statuses[200] >= 10)
            assert not (one.statuses[200] and two.statuses[200])
            one.drains = two.drains = drains
            await worker.until(lambda: not drains or not worker.jobs)
        two.drains = False
        batch = await two.end(batch)
        assert batch.status == "completed"
        assert list(await two.results(batch.output_file_id)) == [f"line {number}" for number in range(60)]
        assert len(worker.seen) < 120, "completed lines are not sent again"


async def test_each_line_ends_and_none_delays_the_others(graph: Graph, tmp_path: Path) -> None:
    deep = json.dumps(chat("deep", x=[])).replace("[]", "[" * 985 + "]" * 985).encode() + b"\n"
    full, text = PlainTextResponse("full", 429), PlainTextResponse("no JSON", 500)
    async with graph.worker() as worker, served(graph, tmp_path) as one:
        one.faults |= {f"full {number}": full for number in range(40)}
        one.faults |= {"text": text, "raises": ValueError()}
        batch = await one.begin(*map(chat, one.faults), deep, chat("a"))
        batch = await one.end(batch, done=4)
        assert batch.status == "in_progress"
        assert one.statuses[500] == runner.MAX_TRIES
        one.faults.clear()
        batch = await one.end(batch)
        errors = await one.results(batch.error_file_id)
        assert errors["raises"]["error"]["code"] == "internal_error"
        assert errors["text"]["response"]["body"] == "no JSON"
        assert errors["deep"]["response"]["status_code"] == 400
        assert len(await one.results(batch.output_file_id)) == len(worker.seen) == 41


async def test_a_batch_whose_lines_are_lost_delays_no_other(graph: Graph, tmp_path: Path) -> None:
    async with graph.worker(), served(graph, tmp_path) as one:
        one.faults["a"] = PlainTextResponse("full", 429)
        batch, other = await one.begin(chat("a")), await one.begin(chat("b"))
        await until(lambda: one.statuses[429] > 0)
        lost = f"DELETE FROM lines WHERE file = '{batch.input_file_id}'"
        await asyncio.to_thread(
            lambda: sqlite3.connect(tmp_path / "data/batches.db").executescript(lost).close()
        )
        assert (await one.end(other)).status == "completed"
        await one.client().batches.cancel(batch.id)
        assert (await one.end(batch)).status == "cancelled"


async def test_a_batch_with_an_unknown_model_delays_no_other(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "UNKNOWN_MODEL_SECONDS", 600.0)
    async with graph.worker(), served(graph, tmp_path) as one:
        unknown, other = await one.begin(chat("a", model="none")), await one.begin(chat("b"))
        assert (await one.end(other)).status == "completed"
        assert (await one.client().batches.retrieve(unknown.id)).status == "in_progress"


async def test_setting_the_clock_ends_no_batch(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with graph.worker(pace=None) as worker, served(graph, tmp_path) as one:
        batch = await one.begin(chat("a"))
        await worker.until(lambda: worker.jobs)
        monkeypatch.setenv("PDSERVE_CLOCK_OFFSET", "90000")
        for _ in range(3):  # between two of these batches, the runner checks every batch
            await one.end(await one.begin(b"nothing", name="bob"), "bob")
        worker.go()
        assert (await one.end(batch)).status == "completed"


async def test_a_full_disk_is_507_and_loses_no_answer(graph: Graph, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        async with graph.worker(pace=None) as worker, served(graph, disk.path) as one:
            batch = await one.begin(*(chat(f"line {number}") for number in range(40)))
            await worker.until(lambda: len(worker.jobs) >= 8)
            disk.fill()
            worker.go()
            await until(lambda: one.statuses[200] >= 8)
            assert (await one.client().batches.retrieve(batch.id)).status == "in_progress"
            with pytest.raises(openai.APIStatusError, match="no space") as caught:
                await one.client().files.create(file=("f", b"x" * 900_000), purpose="batch")
            assert caught.value.status_code == 507
            disk.free()
            batch = await one.end(batch)
            assert len(await one.results(batch.output_file_id)) == len(worker.seen) == 40


async def test_a_damaged_database_is_set_aside(
    graph: Graph, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with graph.worker(), served(graph, tmp_path) as one:
        await one.end(await one.begin(chat("a")))
        with (tmp_path / "data/batches.db").open("r+b") as file:
            file.write(bytes(1000))
        await until(lambda: "starting anew" in caplog.text)
        batch = await one.end(await one.begin(chat("a")))
        assert batch.status == "completed"
        assert len((await one.client().batches.list()).data) == 1
    assert (aside := re.search("moved to ([^;]*)", caplog.text))
    assert modes(Path(aside[1])) == {0}


async def test_the_input_of_a_batch_is_not_deleted_before_its_end(graph: Graph, tmp_path: Path) -> None:
    async with graph.worker(pace=None) as worker, served(graph, tmp_path) as one:
        batch = await one.begin(chat("a"))
        await worker.until(lambda: worker.jobs)
        with pytest.raises(openai.BadRequestError, match="cancel it"):
            await one.client().files.delete(batch.input_file_id)
        await one.client().batches.cancel(batch.id)
        await one.end(batch)
        await one.client().files.delete(batch.input_file_id)


async def test_lines_wait_for_the_limits_of_their_key(graph: Graph, tmp_path: Path) -> None:
    key = ApiKey.of("sk-ann-0123456789", "ann", KeyLimits(concurrent_requests=1))
    async with graph.worker(pace=0.01) as worker, served(graph, tmp_path, [key]) as one:
        batch = await one.end(await one.begin(*(chat(f"line {number}") for number in range(8))))
        assert batch.status == "completed"
        assert len(await one.results(batch.output_file_id)) == len(worker.seen) == 8


async def test_lines_wait_for_a_key_that_is_absent(graph: Graph, tmp_path: Path) -> None:
    async with graph.worker(pace=None) as worker, served(graph, tmp_path) as one:
        batch = await one.begin(*(chat(f"line {number}") for number in range(40)))
        await worker.until(lambda: worker.jobs)
        one.context.keys.replace(KEYS[1:])
        worker.go()
        await until(lambda: one.statuses[401] > 5)
        one.context.keys.replace(KEYS)
        batch = await one.end(batch)
        assert len(await one.results(batch.output_file_id)) == 40


async def test_uploads_are_bounded(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_FILE", 2000)
    monkeypatch.setattr(store, "MAX_FILES", 1)
    monkeypatch.setattr(store, "MAX_OPEN", 1)
    async with served(graph, tmp_path) as one:
        client = one.client()
        for content, purpose, status in ((b"x" * 3000, "batch", 413), (b"x", "fine-tune", 400)):
            with pytest.raises(openai.APIStatusError) as caught:
                await client.files.create(file=("f", content), purpose=purpose)  # type: ignore[arg-type]
            assert caught.value.status_code == status
        batch = await one.begin(chat("a"))
        with pytest.raises(openai.BadRequestError):
            await client.files.create(file=("f", b"x"), purpose="batch")
        with pytest.raises(openai.RateLimitError):
            await one.create(batch.input_file_id)
        field = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\na-%b\r\n--x--\r\n' % (
            b"0" * 900
        )
        form = "multipart/form-data; boundary=x"
        slow = f"{form}; Charset=punycode"  # decoding a megabyte would block the event loop for 750 s
        for body, kind in ((b"", form), (b"--x\r\n", form), (b"x" * 100, form), (field, slow)):
            headers = client.auth_headers | {"content-type": kind}
            answer = await client._client.post("files", content=body, headers=headers)
            assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "the form must be in UTF-8"


@pytest.mark.parametrize("path", ["files", "batches"])
async def test_silent_uploads_leave_room_for_others_and_get_a_408(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(bodies, "DISCARD_WITHIN", 0.1)
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\nx-api-key: sk-ann-0123456789\r\ncontent-length: 1000\r\n"
        "content-type: multipart/form-data; boundary=x\r\n\r\n--x"
    )
    async with served(graph, tmp_path) as one:
        assert isinstance(one.plugin, routes.Batches)
        one.plugin._uploads = one.plugin._bodies = bodies.BodyReader(grace=2.0)
        silent = [await asyncio.open_connection(*address_of(one.url)) for _ in range(16)]
        for _, writer in silent:
            writer.write(head.encode())
        await one.client().files.create(file=("f", b"x"), purpose="batch")
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*(reader.readline() for reader, _ in silent))
        for _, writer in silent:
            writer.close()
    assert {answer.split()[1] for answer in answers} == {b"408"}


async def test_without_a_folder_there_are_no_batches(graph: Graph) -> None:
    for path in ("/v1/batches", "/v1/files"):
        assert (await graph.http.get(path)).status_code == 404
