"""Stored responses: two frontends on one registry and one store, as clients see them. Every request about a response
goes to the frontend that did not make it, unless a test says otherwise."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, NotFoundError

from pdserve.config.api_keys import ApiKey
from pdserve.frontend.keys.auth import ApiKeys
from pdserve.frontend.model.stored import StoredResponses
from pdserve.frontend.peers import answer_peer
from pdserve.queue.memory import MemoryBroker, MemoryResponses
from pdserve.queue.responses import StoreLimits
from pdserve.records import Instance, Role, encode_record
from pdserve.registry import keys
from pdserve.registry.memory import MemoryRegistry, MemoryServer
from tests.conditions import until
from tests.frontend.conftest import Frontend, Graph

pytestmark = pytest.mark.asyncio(loop_scope="session")

ALICE, BOB = {"Authorization": "Bearer alice-key"}, {"Authorization": "Bearer bob-key"}
ASK = {"model": "demo", "input": "hello", "max_output_tokens": 8, "temperature": 0}


class StoringFrontend(Frontend):
    """One of several on the same registry and store."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.stored: StoredResponses
        self.lease: MemoryRegistry
        self._stack = AsyncExitStack()

    async def enter(self, server: MemoryServer, broker: MemoryBroker, state: Path) -> None:
        store = MemoryResponses(broker, "ns", StoreLimits())
        self.stored = await self._stack.enter_async_context(StoredResponses(store, self.id))
        allowed = ApiKeys([ApiKey.of("alice-key", "alice"), ApiKey.of("bob-key", "bob")])
        await self.start(self._stack, server, state, keys=allowed, stored=self.stored)
        await store.listen(self.id, lambda question: answer_peer(self.app, question))
        self.lease = await self._stack.enter_async_context(MemoryRegistry(server))
        instance = Instance(self.id, Role.FRONTEND)
        await self.lease.put(keys.instance(instance), encode_record(instance))
        self.http.headers.update(ALICE)

    async def stop(self) -> None:
        """As by SIGTERM, with a drain of a second."""
        await self._stack.aclose()


class Pair(Graph):
    """`graph.worker` is served by both."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        super().__init__()
        self.broker = MemoryBroker()
        self._folder = folder
        self._serial = itertools.count()
        self.one: StoringFrontend
        self.other: StoringFrontend

    async def frontend(self) -> StoringFrontend:
        frontend = StoringFrontend(f"frontend-{next(self._serial)}-test")
        await frontend.enter(self.registry, self.broker, self._folder())
        return frontend


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def both(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    pair = Pair(lambda: tmp_path_factory.mktemp("state"))
    pair.one, pair.other = await pair.frontend(), await pair.frontend()
    yield pair
    await pair.one.stop()
    await pair.other.stop()


@asynccontextmanager
async def background(both: Pair, **more: Any) -> AsyncIterator[tuple[str, Any]]:
    """One that makes its tokens by hand: its id, and its worker."""
    async with both.worker(pace=None) as worker:
        answer = await both.one.http.post("/v1/responses", json={**ASK, "background": True, **more})
        assert answer.json()["status"] == "queued"
        await worker.until(lambda: worker.jobs)
        yield answer.json()["id"], worker


async def get(frontend: Frontend, response_id: str, **query: Any) -> httpx.Response:
    return await frontend.http.get(f"/v1/responses/{response_id}", params=query)


async def ends(frontend: Frontend, response_id: str) -> Any:
    """The response, when it is over."""
    answer: Any = None

    async def over() -> bool:
        nonlocal answer
        answer = (await get(frontend, response_id)).json()
        return answer["status"] not in ("queued", "in_progress")

    await until(over, 15)
    return answer


def events(text: str) -> list[Any]:
    return [
        json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")
    ]


async def test_what_one_made_the_other_retrieves(both: Pair) -> None:
    async with both.worker():
        made = await both.one.http.post("/v1/responses", json=ASK)
        streamed = await both.one.http.post("/v1/responses", json={**ASK, "stream": True})
    last = events(streamed.text)[-1]["response"]
    for response in (made.json(), last):
        found = await get(both.other, response["id"])
        assert found.status_code == 200
        assert found.json() == response
        assert (await get(both.one, response["id"])).json() == response


async def test_what_is_not_to_be_stored_is_not(both: Pair) -> None:
    async with both.worker():
        made = await both.one.http.post("/v1/responses", json={**ASK, "store": False})
    for frontend in (both.one, both.other):
        missing = await get(frontend, made.json()["id"])
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "invalid_request_error"


async def test_a_conversation_goes_on_at_any_frontend(both: Pair) -> None:
    """The same prompt as where all of it is in one request."""
    async with both.worker() as worker:
        first = (await both.one.http.post("/v1/responses", json={**ASK, "instructions": "Be brief."})).json()
        again = {**ASK, "input": "And then?", "previous_response_id": first["id"]}
        second = (await both.other.http.post("/v1/responses", json=again)).json()
        third = {**ASK, "input": [{"role": "user", "content": "Why?"}], "previous_response_id": second["id"]}
        await both.one.http.post("/v1/responses", json=third)
        turns = [("user", "hello"), first, ("user", "And then?"), second, ("user", "Why?")]
        whole = [
            {"role": turn[0], "content": turn[1]}
            if isinstance(turn, tuple)
            else {"role": "assistant", "content": turn["output"][0]["content"][0]["text"]}
            for turn in turns
        ]
        await both.one.http.post("/v1/responses", json={**ASK, "input": whole})
        prompts = [submit.prompt for submit in worker.seen]
    assert prompts[2] == prompts[3]
    assert len(prompts[1]) > len(prompts[0])


async def test_another_key_does_not_find_it(both: Pair) -> None:
    async with both.worker():
        made = (await both.one.http.post("/v1/responses", json=ASK)).json()["id"]
        for frontend in (both.one, both.other):
            for answer in (
                await frontend.http.get(f"/v1/responses/{made}", headers=BOB),
                await frontend.http.post(f"/v1/responses/{made}/cancel", headers=BOB),
                await frontend.http.post(
                    "/v1/responses", json={**ASK, "previous_response_id": made}, headers=BOB
                ),
            ):
                assert answer.status_code == 404
                error = answer.json()["error"]
                assert error["message"] == f"Response with id '{made}' not found."
                assert error["type"] == "invalid_request_error"
        assert (await get(both.other, made)).status_code == 200


async def test_two_clients_may_use_the_same_id(both: Pair) -> None:
    async with both.worker(pace=None) as worker:
        mine = {**ASK, "request_id": "resp_mine", "background": True}
        for number, client in enumerate((ALICE, BOB)):
            await both.one.http.post("/v1/responses", json={**mine, "user": str(number)}, headers=client)
        await worker.until(lambda: len(worker.jobs) == 2)
        await both.other.http.post("/v1/responses/resp_mine/cancel", headers=BOB)
        await worker.until(lambda: len(worker.cancelled) == 1)
        worker.go()
        alices = await ends(both.other, "resp_mine")
        bobs = (await both.other.http.get("/v1/responses/resp_mine", headers=BOB)).json()
    assert (alices["user"], alices["status"]) == ("0", "incomplete")
    assert (bobs["user"], bobs["status"]) == ("1", "cancelled")


async def test_requests_that_choose_the_same_id_are_held_each(both: Pair) -> None:
    """None of them escapes admission, the deadline or a drain."""
    async with both.worker(pace=None) as worker:
        same = {**ASK, "request_id": "resp_same", "background": True}
        for number in range(3):
            await both.one.http.post("/v1/responses", json={**same, "user": str(number)})
        await worker.until(lambda: len(worker.jobs) == 3)
        assert both.one.models.load() == 3
        worker.go()
        await ends(both.other, "resp_same")
    await until(lambda: both.one.models.load() == 0)
    assert not both.one.stored._running


async def test_a_previous_response_that_is_no_text(both: Pair) -> None:
    body = json.dumps({**ASK, "previous_response_id": "\ud800"})
    async with both.worker():
        answer = await both.one.http.post("/v1/responses", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "previous_response_id"


async def test_background_is_seen_everywhere(both: Pair) -> None:
    async with background(both) as (made, worker):
        for frontend in (both.one, both.other):
            assert (await get(frontend, made)).json()["status"] == "queued"
        worker.go()
        done = await ends(both.other, made)
    assert done["output"][0]["content"][0]["text"]
    assert (await get(both.one, made)).json() == done


async def test_background_counts_until_it_is_over(both: Pair) -> None:
    """It holds its place, and the frontend's load and its receipt say so, though its client has its answer."""
    async with background(both) as (made, worker):
        assert both.one.models.load() == 1
        assert both.one.models.report().running == 1
        (receipt,) = both.one.app.receipts.newest(1)
        assert (receipt.status, receipt.running, receipt.key) == (200, True, "alice")
        assert [hop.name for hop in receipt.hops] == ["admission"]
        worker.go()
        await ends(both.other, made)
    await until(lambda: both.one.models.load() == 0)
    await until(lambda: not both.one.app.receipts.newest(1)[0].running)
    (receipt,) = both.one.app.receipts.newest(1)
    assert [hop.name for hop in receipt.hops] == ["admission", "decode"]
    assert receipt.error == ""
    assert receipt.output_tokens > 0


async def test_background_is_cancelled_from_anywhere(both: Pair) -> None:
    for frontend in (both.one, both.other):
        async with background(both) as (made, worker):
            answer = await frontend.http.post(f"/v1/responses/{made}/cancel")
            assert answer.json()["status"] == "cancelled"
            await worker.until(lambda worker=worker: worker.cancelled)
            await until(lambda: both.one.models.load() == 0)
        for each in (both.one, both.other):
            assert (await get(each, made)).json()["status"] == "cancelled"
        twice = await frontend.http.post(f"/v1/responses/{made}/cancel")
        assert twice.status_code == 400


async def test_background_ends_at_its_deadline(both: Pair) -> None:
    async with both.worker(pace=None) as worker:
        answer = await both.one.http.post(
            "/v1/responses", json={**ASK, "background": True}, headers={"x-request-timeout": "0.5"}
        )
        done = await ends(both.other, answer.json()["id"])
        await worker.until(lambda: worker.cancelled)
    assert done["status"] == "failed"
    assert "deadline" in done["error"]["message"]
    await until(lambda: both.one.models.load() == 0)


async def test_background_that_fails(both: Pair) -> None:
    """vLLM would leave it queued for ever."""
    async with background(both) as (made, _):
        core = both.one.models.find("demo").processor.core  # type: ignore[union-attr]
        generation = next(iter(core._generations.values()))
        core._fail_alone(generation, RuntimeError("broken"))
        done = await ends(both.other, made)
    assert done["status"] == "failed"
    assert "internal error" in done["error"]["message"]


@pytest.mark.parametrize("late", [False, True], ids=["while it runs", "when it is over"])
async def test_background_stream_is_read_again(both: Pair, late: bool) -> None:
    async with both.worker(pace=0.1) as worker:
        begun = asyncio.create_task(
            both.one.http.post("/v1/responses", json={**ASK, "background": True, "stream": True})
        )
        await worker.until(lambda: worker.jobs)
        await until(lambda: bool(both.one.stored._running))
        made = next(iter(both.one.stored._running))[1]
        if late:
            await begun
            await ends(both.other, made)
        again = await get(both.other, made, stream="true")
        here = await get(both.one, made, stream="true", starting_after=1)
        first = await begun
    assert again.headers["content-type"].startswith("text/event-stream")
    assert again.text == first.text
    assert [event["sequence_number"] for event in events(again.text)] == list(range(len(events(again.text))))
    assert events(here.text) == events(first.text)[2:]


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_where_a_stream_is_read_on_is_a_whole_number(both: Pair, stream: str) -> None:
    async with both.worker():
        begun = await both.one.http.post("/v1/responses", json={**ASK, "background": True, "stream": True})
        made = events(begun.text)[0]["response"]["id"]
        await ends(both.one, made)
        last = len(events(begun.text)) - 1
        for frontend in (both.one, both.other):
            for after in range(-last - 3, last + 4):
                answer = await frontend.http.get(
                    f"/v1/responses/{made}", params={"stream": stream, "starting_after": after}
                )
                good = 0 <= after < last or (after >= 0 and stream == "false")
                assert answer.status_code == (200 if good else 400), (after, answer.text)
            for odd in (
                "9" * 5000,
                "-" + "9" * 5000,
                "+1",
                "1_0",
                "1.0",
                " 1",
                "\u0661",
                "1e1",
                "x",
                "",
                "-0",
            ):
                answer = await frontend.http.get(
                    f"/v1/responses/{made}", params={"stream": stream, "starting_after": odd}
                )
                assert answer.status_code == 400, odd
                assert answer.json()["error"]["param"] == "starting_after"


async def test_a_client_that_leaves_a_background_stream_leaves_the_response(both: Pair) -> None:
    async with both.worker(pace=0.1):
        body = {**ASK, "background": True, "stream": True}
        async with both.one.http.stream("POST", "/v1/responses", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    made = json.loads(line.removeprefix("data: "))["response"]["id"]
                    break
        done = await ends(both.other, made)
    assert done["status"] == "incomplete"
    assert done["usage"]["output_tokens"] == 8


async def test_a_stream_that_was_cancelled_ends(both: Pair) -> None:
    """vLLM would keep its readers waiting for ever."""
    async with both.worker(pace=None) as worker:
        body = {**ASK, "background": True, "stream": True}
        begun = asyncio.create_task(both.one.http.post("/v1/responses", json=body))
        await worker.until(lambda: worker.jobs)
        await until(lambda: bool(both.one.stored._running))
        made = next(iter(both.one.stored._running))[1]
        reading = asyncio.create_task(get(both.other, made, stream="true"))
        await asyncio.sleep(0.1)
        await both.other.http.post(f"/v1/responses/{made}/cancel")
        async with asyncio.timeout(5):
            texts = [
                (await begun).text,
                (await reading).text,
                (await get(both.one, made, stream="true")).text,
            ]
    assert all("cancelled" in text for text in texts), texts


async def test_a_stopped_frontend_leaves_what_it_could_not_finish_as_failed(both: Pair) -> None:
    third = await both.frontend()
    async with both.worker(pace=None) as worker:
        await until(lambda: bool(third.models.known()))
        answer = await third.http.post("/v1/responses", json={**ASK, "background": True})
        await worker.until(lambda: worker.jobs)
        await third.stop()
        done = (await get(both.other, answer.json()["id"])).json()
    assert done["status"] == "failed"
    assert done["error"]["message"] == "the frontend was stopped"


async def test_a_frontend_that_died(both: Pair) -> None:
    """Its lease is gone, and nothing answers for it."""
    third = await both.frontend()
    async with both.worker(pace=None) as worker:
        await until(lambda: bool(third.models.known()))
        answer = await third.http.post("/v1/responses", json={**ASK, "background": True})
        made = answer.json()["id"]
        await worker.until(lambda: worker.jobs)
        del both.broker.frontends["ns", third.id]
        assert (await get(both.other, made)).json()[
            "status"
        ] == "queued"  # it is registered: it may come back
        for unreachable in (
            await get(both.other, made, stream="true"),
            await both.other.http.post(f"/v1/responses/{made}/cancel"),
        ):
            assert unreachable.status_code == 503
            assert "retry-after" in unreachable.headers
        await third.lease.delete(keys.instance(Instance(third.id, Role.FRONTEND)))
        done = await ends(both.other, made)
        again = await both.other.http.post(f"/v1/responses/{made}/cancel")
        await third.stop()
    assert done["status"] == "failed"
    assert done["error"]["message"] == "the frontend that made it is gone"
    assert again.status_code == 400


async def test_without_the_store_requests_are_answered(both: Pair) -> None:
    async with both.worker():
        made = (await both.one.http.post("/v1/responses", json=ASK)).json()["id"]
        await both.broker.down()
        try:
            answer = await both.one.http.post("/v1/responses", json=ASK)
            behind = await both.one.http.post(
                "/v1/responses", json={**ASK, "background": True, "request_id": "resp_outage"}
            )
            found = await get(both.one, made)
            following = await both.one.http.post("/v1/responses", json={**ASK, "previous_response_id": made})
        finally:
            await both.broker.up()
    assert answer.status_code == behind.status_code == 200
    assert found.status_code == following.status_code == 503
    assert "retry-after" in found.headers
    assert (await get(both.one, made)).status_code == 200


async def test_nothing_of_it_stays_in_the_frontend(both: Pair) -> None:
    async with both.worker():
        for more in ({}, {"stream": True}, {"background": True}, {"background": True, "stream": True}):
            await both.one.http.post("/v1/responses", json={**ASK, **more})
        await until(lambda: not both.one.stored._running)
    assert not both.other.stored._running


async def test_the_official_client(both: Pair) -> None:
    async with (
        both.worker(pace=0.01),
        AsyncOpenAI(base_url=f"{both.one.url}/v1", api_key="alice-key", max_retries=0) as one,
        AsyncOpenAI(base_url=f"{both.other.url}/v1", api_key="alice-key", max_retries=0) as other,
        AsyncOpenAI(base_url=f"{both.other.url}/v1", api_key="bob-key", max_retries=0) as bob,
    ):
        first = await one.responses.create(model="demo", input="hello", max_output_tokens=4)
        assert await other.responses.retrieve(first.id) == first
        second = await other.responses.create(
            model="demo", input="more", max_output_tokens=4, previous_response_id=first.id
        )
        assert second.previous_response_id == first.id
        with pytest.raises(NotFoundError):
            await bob.responses.retrieve(first.id)
        running = await one.responses.create(
            model="demo", input="hello", max_output_tokens=200, background=True
        )
        assert running.status == "queued"
        cancelled = await other.responses.cancel(running.id)
        assert cancelled.status == "cancelled"
        stream = await one.responses.create(
            model="demo", input="hello", max_output_tokens=4, background=True, stream=True
        )
        seen = [event async for event in stream]
        response: Any = seen[0]
        replayed = await other.responses.retrieve(response.response.id, stream=True, starting_after=2)
        assert [event async for event in replayed] == seen[3:]
