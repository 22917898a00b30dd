"""One vLLM server and one graph, which get the same requests."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx

from tests.conformance.answers import Answer, Request, answer_of, differences, without
from tests.conformance.differences import DIFFERENCES, EVERYWHERE, WHERE
from tests.real import KEY

FRESH = httpx.Limits(keepalive_expiry=1.0)
"""Reuse no connection that was idle for 1 s. vLLM's server closes idle ones after 5 s, maybe while a request comes."""


class Pair:
    """A context manager that sends requests to both servers."""

    def __init__(self, ours: str, theirs: str) -> None:
        self.ours, self.theirs = ours, theirs
        """URLs."""
        self._stack = ExitStack()
        self._clients = [httpx.Client(base_url=url, timeout=120, limits=FRESH) for url in (ours, theirs)]
        self._pool = ThreadPoolExecutor(16)
        self._begun: dict[str, list[Future[Answer]]] = {}
        self._prefill_modes: list[str] = []

    def __enter__(self) -> "Pair":
        self._stack.enter_context(self._pool)
        self._stack.callback(lambda: self._pool.shutdown(cancel_futures=True))
        for client in self._clients:
            self._stack.enter_context(client)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        remote = self._prefill_modes.count("remote")
        assert remote >= 0.8 * len(self._prefill_modes), (
            f"{remote} of {len(self._prefill_modes)} prompts were prefilled remotely"
        )

    def remote(self, ours: Answer) -> None:
        """Count a response whose prompt should be prefilled remotely. At least 80 % of these prompts must be. The
        others may time out on a busy machine and be prefilled locally."""
        self._prefill_modes.append(ours.prefill)

    def begin(self, requests: Iterable[Request]) -> None:
        """Send requests in advance, several at a time. Their names must be unique."""
        for request in requests:
            self._begun[request.name] = self._ask(request)

    def both(self, request: Request) -> tuple[Answer, Answer]:
        """Return both responses, requested at the same time unless sent in advance."""
        ours, theirs = self._begun.pop(request.name, None) or self._ask(request)
        return ours.result(), theirs.result()

    def _ask(self, request: Request) -> "list[Future[Answer]]":
        return [self._pool.submit(ask, client, request) for client in self._clients]

    def same(self, request: Request) -> Answer:
        """Return our response after checking it with the function `same`."""
        ours, theirs = self.both(request)
        same(request, ours, theirs)
        return ours


def same(request: Request, ours: Answer, theirs: Answer) -> None:
    """Our response must equal theirs, except for the difference that `request.differs` names, which must exist."""
    mine, their = _compared(ours), _shaped(request.path, _compared(theirs))
    if request.differs:
        assert request.differs in DIFFERENCES, "docs/api.md does not list it"
        assert any(differences(mine, their)), f"{request.differs} is no difference any more"
        for path in WHERE.get(request.differs, EVERYWHERE):
            mine, their = without(mine, path), without(their, path)
    found = list(differences(mine, their))
    assert not found, found


def ask(client: httpx.Client, request: Request) -> Answer:
    content: dict[str, Any] = (
        {"json": request.json} if request.content is None else {"content": request.content}
    )
    if request.content is None and request.json is None:
        content = {}
    default = {"authorization": f"Bearer {KEY}"}
    if request.content is not None:
        default["content-type"] = "application/json"
    headers = {name: value for name, value in (default | request.headers).items() if value}
    return answer_of(client.request(request.method, request.path, headers=headers, **content))


def alone(url: str, request: Request) -> Answer:
    """Ask one server, in tests where the two do not run at the same time."""
    with httpx.Client(base_url=url, timeout=300) as client:
        return ask(client, request)


def _shaped(path: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Convert vLLM's two other formats of errors, which docs/api.md lists, to the format of the route."""
    body, status = answer["body"], answer["status"]
    if status == 400 and isinstance(body, dict) and "detail" in body:
        error = {"message": body["detail"], "type": "BadRequestError", "param": None, "code": status}
        body = {"error": error}
    if status >= 400 and path.startswith("/v1/messages") and isinstance(body, dict) and "error" in body:
        body = {"type": "error", "error": {name: body["error"][name] for name in ("type", "message")}}
    return {**answer, "body": body}


def _compared(answer: Answer) -> dict[str, Any]:
    return {"status": answer.status, "headers": answer.headers, "body": answer.body}
