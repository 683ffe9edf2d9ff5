"""SageMaker's ``/invocations``: one path for what has paths of its own, told apart by the fields of
the body."""

from collections.abc import Set

from aiohttp import web

from services.gateway.apis.pooling.endpoint import (
    CLASSIFY,
    EMBEDDINGS,
    RERANK,
    SCORE,
    PoolingEndpoint,
    PoolingEndpoints,
)
from services.gateway.chat.completions import Completions
from services.gateway.chat.generation import CHAT, TEXT, CompletionEndpoint
from services.gateway.chat.intake import Intake
from services.gateway.chat.requests.json_body import decode
from services.gateway.http.body import READ_BODY
from services.gateway.mesh.mesh import Mesh
from shared.errors import InvalidRequest
from shared.wire.messages import ModelInfo

ROUTE = "/invocations"


class Invocations:
    def __init__(
        self, mesh: Mesh, intake: Intake, completions: Completions, pooling: PoolingEndpoints
    ) -> None:
        self._mesh = mesh
        self._intake = intake
        self._completions = completions
        self._pooling = pooling

    def routes(self) -> list[web.RouteDef]:
        return [web.post(ROUTE, self._serve)]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        with self._intake.admission.admit() as reservation:
            body = request[READ_BODY] = await self._intake.bodies.read(request, reservation)
            fields = await self._intake.parser.parse(body, lambda body: decode(body).keys())
            model = await self._mesh.tokenizers.ready_model()
            reservation.is_served = True
        match endpoint_of(fields, model):
            case PoolingEndpoint() as endpoint:
                return await self._pooling.serve(request, endpoint)
            case endpoint:
                return await self._completions.serve(request, endpoint)


def endpoint_of(fields: Set[str], model: ModelInfo) -> PoolingEndpoint | CompletionEndpoint:
    """In vLLM's order. Raises InvalidRequest."""
    if "messages" in fields:
        return CHAT
    if "prompt" in fields:
        return TEXT
    if "input" in fields:
        classifies = model.pooling is not None and model.pooling.task == "classify"
        return CLASSIFY if classifies else EMBEDDINGS
    if fields & {"text_1", "text_2", "queries"}:
        return SCORE
    if "query" in fields:
        return RERANK
    raise InvalidRequest(
        "the body is none of a chat (messages), a completion (prompt), embeddings or classes"
        " (input), scores (text_1 or queries) and ranks (query)"
    )
