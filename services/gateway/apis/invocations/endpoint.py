"""SageMaker's ``/invocations``: one path for several endpoints, chosen by the fields of the
body."""

from collections.abc import Set

from aiohttp import web

from services.gateway.api import Api, Core
from services.gateway.chat.endpoint import CHATS, TEXTS
from services.gateway.chat.requests.json_body import decode
from services.gateway.http.body import READ_BODY
from shared.errors import InvalidRequest
from shared.wire.messages import ModelInfo

ROUTE = "/invocations"


class Invocations(Api):
    generating_routes = (ROUTE,)

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[web.RouteDef]:
        return [web.post(ROUTE, self._serve)]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        intake = self._core.intake
        with intake.admission.admit() as reservation:
            body = request[READ_BODY] = await intake.bodies.read(request, reservation)
            fields = await intake.parser.parse(body, lambda body: decode(body).keys())
            model = await self._core.mesh.tokenizers.ready_model()
            reservation.is_served = True
        handler = self._core.posted.get(path_of(fields, model))
        if handler is None:
            raise unknown_body()
        return await handler(request)


def path_of(fields: Set[str], model: ModelInfo) -> str:
    """In vLLM's order. Raises InvalidRequest."""
    if "messages" in fields:
        return CHATS
    if "prompt" in fields:
        return TEXTS
    if "input" in fields:
        classifies = model.pooling is not None and model.pooling.task == "classify"
        return "/classify" if classifies else "/v1/embeddings"
    if fields & {"text_1", "text_2", "queries"}:
        return "/score"
    if "query" in fields:
        return "/rerank"
    raise unknown_body()


def unknown_body() -> InvalidRequest:
    return InvalidRequest(
        "the body is none of a chat (messages), a completion (prompt), embeddings or classes"
        " (input), scores (text_1 or queries) and ranks (query)"
    )
