"""Batches, as OpenAI's client sees them, with an echoing decode worker."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Set
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Batch

from pdserve.config.api_keys import ApiKey, KeyLimits
from pdserve.config.schema import FrontendConfig
from pdserve.frontend.app import FrontendApp
from pdserve.frontend.batches import pages, store, work
from pdserve.frontend.edge import body as bodies
from pdserve.frontend.keys.auth import ApiKeys
from pdserve.frontend.ribs import Ribs
from pdserve.slo import SPARE
from tests.conditions import until
from tests.frontend.conftest import Graph, address_of, serve

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT: Final = "/v1/chat/completions"
KEYS = [ApiKey.of(f"sk-{name}-0123456789", name) for name in ("ann", "bob")]


def chat(custom_id: str, *, url: str = CHAT, **changes: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": custom_id}], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body | changes}


def jsonl(*lines: object) -> bytes:
    return b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)


class Served:
    """A frontend with batches; its clients by the name of their keys."""

    def __init__(self, graph: Graph, folder: Path, keys: list[ApiKey]) -> None:
        self.drains = False
        config = FrontendConfig(batches=folder)
        self.context = replace(
            graph.context,
            keys=ApiKeys(keys),
            running={},
            app=lambda: self.app,
            config=config,
            draining=lambda: self.drains,
        )
        ribs = Ribs.load(self.context)
        self.app, self.work = FrontendApp(graph.models, self.context.keys, ribs, 20.0), ribs.work["batches"]
        self.url = ""
        self.clients: dict[str, AsyncOpenAI] = {}

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

    async def end(self, batch: Batch, name: str = "ann") -> Batch:
        for _ in range(600):
            batch = await self.client(name).batches.retrieve(batch.id)
            if batch.status not in ("validating", "in_progress", "cancelling"):
                return batch
            await asyncio.sleep(0.05)
        raise AssertionError(batch)

    async def results(self, file_id: str | None, name: str = "ann") -> dict[str, dict[str, Any]]:
        """By `custom_id`, each of which is there once."""
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
        working = asyncio.ensure_future(one.work())
        try:
            yield one
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            for client in one.clients.values():
                await client.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "LOOK", 0.05)
    monkeypatch.setattr(work, "PAUSE", 0.05)
    monkeypatch.setattr(work, "UNKNOWN_FOR", 0.2)


async def test_a_batch_from_upload_to_results(graph: Graph, tmp_path: Path) -> None:
    async with graph.worker() as worker, served(graph, tmp_path) as one:
        batch = await one.begin(chat("a"), chat("b"), chat("c", max_tokens=-1), chat("d", model="none"))
        assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
        batch = await one.end(batch)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
        good, bad = await one.results(batch.output_file_id), await one.results(batch.error_file_id)
        assert {line["response"]["status_code"] for line in good.values()} == {200}
        assert good["a"]["response"]["body"]["choices"][0]["message"]["content"]
        assert {name: line["response"]["status_code"] for name, line in bad.items()} == {"c": 400, "d": 404}
        assert good.keys() == {"a", "b"}
        assert {submit.client[:1] for submit in worker.seen} == {SPARE}


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
    ],
)
async def test_a_batch_with_bad_lines_fails_and_none_is_sent(
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


async def test_batches_that_are_over_cost_no_looks_and_old_ones_are_forgotten(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, read, stores, looks = store.Store.get, list[str](), store.stores, list[Path]()

    def counting(self: store.Store, kind: type[Any], record_id: str) -> Any:
        read.append(record_id)
        return get(self, kind, record_id)

    def looking(folder: Path) -> list[store.Store]:
        looks.append(folder)
        return stores(folder)

    monkeypatch.setattr(pages, "MAX_OVER", 2)
    monkeypatch.setattr(work, "stores", looking)
    async with graph.worker(), served(graph, tmp_path) as one:
        made = [(await one.end(await one.begin(b"nothing"))).id for _ in range(4)]
        kept = [batch.id for batch in (await one.client().batches.list()).data]
        assert (len(kept), set(kept) <= set(made)) == (3, True)
        monkeypatch.setattr(store.Store, "get", counting)
        looks.clear()
        await until(lambda: len(looks) > 5)
        assert all(read.count(each) <= 1 for each in kept)


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


@pytest.mark.parametrize("ends", ["cancelled", "expired", "drains"])
async def test_what_runs_ends_where_the_batch_or_its_frontend_ends(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    async with graph.worker(pace=None) as worker, served(graph, tmp_path) as one:
        monkeypatch.setattr(pages, "WINDOW", 3 if ends == "expired" else 24 * 3600)
        batch = await one.begin(chat("a"), chat("b"))
        await worker.until(lambda: len(worker.jobs) == 2)
        if ends == "cancelled":
            assert (await one.client().batches.cancel(batch.id)).status == "cancelling"
        if ends == "drains":
            one.drains = True
            await worker.until(lambda: not worker.jobs)
            assert (await one.client().batches.retrieve(batch.id)).status == "in_progress"
            return
        batch = await one.end(batch)
        assert batch.status == ends
        await worker.until(lambda: not worker.jobs)
        with pytest.raises(openai.BadRequestError):
            await one.client().batches.cancel(batch.id)
        errors = await one.results(batch.error_file_id)
        assert {line["error"]["code"] for line in errors.values()} == (
            {"batch_expired"} if ends == "expired" else set()
        )


async def test_a_batch_goes_on_where_it_was_after_a_drain_and_a_cut_line(
    graph: Graph, tmp_path: Path
) -> None:
    lines = [chat(f"line {number}") for number in range(60)]
    async with graph.worker(at_once=2) as worker, served(graph, tmp_path) as one:
        batch = await one.begin(*lines)
        await worker.until(lambda: len(worker.seen) >= 10)
        output = tmp_path / "ann/files" / f"file-{batch.id.removeprefix('batch_')}-output"
        await until(lambda: output.exists() and output.stat().st_size > 0)
        one.drains = True
        await worker.until(lambda: not worker.jobs)
        begun = len(worker.seen)
        assert begun < 60
    with output.open("ab") as file:
        file.write(b'{"custom_id": "line 59", "resp')
    async with graph.worker() as worker, served(graph, tmp_path) as one:
        batch = await one.end(batch)
        assert batch.status == "completed"
        assert len(await one.results(batch.output_file_id)) == 60
        assert begun + len(worker.seen) < 120, "what was done is not done again"


async def test_lines_are_read_beside_the_event_loop(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, threads = store.Store.lines, list[threading.Thread]()

    def watched(self: store.Store, batch: store.Batch, done: Set[str]) -> Iterator[store.Line]:
        for line in lines(self, batch, done):
            threads.append(threading.current_thread())
            yield line

    monkeypatch.setattr(store.Store, "lines", watched)
    async with graph.worker(), served(graph, tmp_path) as one:
        await one.end(await one.begin(chat("a"), chat("b")))
    assert len(threads) == 2
    assert threading.current_thread() not in threads


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


async def test_lines_fail_when_their_key_is_gone(graph: Graph, tmp_path: Path) -> None:
    async with graph.worker(pace=None) as worker, served(graph, tmp_path) as one:
        batch = await one.begin(chat("a"))
        await worker.until(lambda: worker.jobs)
        other = await one.begin(chat("b"))
        keys = one.context.keys
        keys.replace(KEYS[1:])
        worker.go()
        record = tmp_path / "ann/batches" / f"{other.id}.json"
        await until(lambda: json.loads(record.read_text())["status"] == "completed")
        keys.replace(KEYS)
        errors = await one.results((await one.end(other)).error_file_id)
        assert errors["b"]["response"]["status_code"] == 401
        assert len(await one.results((await one.end(batch)).output_file_id)) == 1


async def test_uploads_are_bounded(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_FILE", 2000)
    monkeypatch.setattr(pages, "MAX_FILES", 1)
    monkeypatch.setattr(pages, "MAX_OPEN", 1)
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
        for body in (b"", b"--x\r\n", b"x" * 100):
            answer = await client._client.post(
                "files",
                content=body,
                headers=client.auth_headers | {"content-type": "multipart/form-data; boundary=x"},
            )
            assert answer.status_code == 400


@pytest.mark.parametrize("path", ["files", "batches"])
async def test_bodies_that_do_not_come_leave_room_for_others_and_end(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(pages, "WITHIN", 1.0)
    monkeypatch.setattr(bodies, "DISCARD_WITHIN", 0.1)
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\nx-api-key: sk-ann-0123456789\r\ncontent-length: 1000\r\n"
        "content-type: multipart/form-data; boundary=x\r\n\r\n"
    )
    async with served(graph, tmp_path) as one:
        silent = [await asyncio.open_connection(*address_of(one.url)) for _ in range(16)]
        for _, writer in silent:
            writer.write(head.encode())
        await one.client("bob").files.create(file=("f", b"x"), purpose="batch")
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*(reader.readline() for reader, _ in silent))
        for _, writer in silent:
            writer.close()
    assert {answer.split()[1] for answer in answers} == ({b"408", b"429"} if path == "files" else {b"408"})


async def test_without_a_folder_there_are_no_batches(graph: Graph) -> None:
    for path in ("/v1/batches", "/v1/files"):
        assert (await graph.http.get(path)).status_code == 404
