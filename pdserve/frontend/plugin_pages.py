"""The pages beside the models' apps: the list of models, and those of the plugins."""

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send

from pdserve.contract.records import Adapter, ModelCard
from pdserve.frontend.edge.response import HttpError, error_response
from pdserve.frontend.model.served_models import ServedModels
from pdserve.frontend.vllm.openapi import LEFT_OUT


class FrontendPages:
    """An ASGI app. Raises HttpError for what there is no page for."""

    def __init__(self, models: ServedModels, others: Sequence[Route]) -> None:
        self._models = models
        own = [Route("/v1/models", self._list), Route("/v1/models/{name:path}", self._list)]
        self._routes = [*own, *others]
        self.paths = frozenset(route.path for route in self._routes)
        self._router = Router(self._routes, redirect_slashes=False, default=_not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._router({**scope, "app": self}, receive, send)  # with an app, a wrong method raises
        except HTTPException as error:
            found = (route for route in self._routes if route.matches(scope)[0] is not Match.NONE)
            methods = ", ".join(sorted({method for route in found for method in route.methods or ()}))
            wrong = HttpError(error.status_code, f"{scope['path']} takes {methods}")
            answer = error_response(scope["path"], wrong)
            answer.headers["allow"] = methods
            await answer(scope, receive, send)

    async def _list(self, request: Request) -> Response:
        """All models, or the one that the path names."""
        found, name = [_listing(card) for card in self._models.listed()], request.path_params.get("name")
        found += [_adapter_listing(*each) for each in self._models.adapters()]
        if not name:
            return JSONResponse({"object": "list", "data": found})
        for listing in found:
            if listing["id"] == name:
                return JSONResponse(listing)
        raise HttpError(404, f"The model `{name}` does not exist.", "model")


def _listing(card: ModelCard) -> dict[str, object]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "pdserve",
        "root": card.model,
        "parent": None,
        "max_model_len": card.max_model_len,
    }


def _adapter_listing(card: ModelCard, adapter: Adapter) -> dict[str, object]:
    own = {"id": adapter.name, "root": adapter.path, "parent": card.name, "max_model_len": None}
    return _listing(card) | own


async def _not_found(scope: Scope, _: Receive, __: Send) -> None:
    path = scope["path"]
    if LEFT_OUT.fullmatch(path):
        raise HttpError(404, f"{path} is not available on a separated graph")
    raise HttpError(404, f"there is no {path}")
