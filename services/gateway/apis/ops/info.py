"""Endpoints about the gateway and its model: models, health, version, load and metrics."""

from collections.abc import Callable
from datetime import UTC, datetime

from aiohttp import web
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.gateway.apis.messages.client import is_anthropic
from services.gateway.apis.messages.replies import objects as anthropic
from services.gateway.chat.replies.openai import Model, ModelList, ModelTraits, PooledModel
from services.gateway.http.account import owner_of
from services.gateway.http.json_reply import json_response
from services.gateway.http.violations import unknown_model
from services.gateway.mesh.mesh import Mesh
from services.gateway.metrics import registry_of
from shared.version import VERSION
from shared.wire.messages import Heartbeat, ModelInfo, State


class Info:
    def __init__(self, mesh: Mesh, status: Callable[[], Heartbeat]) -> None:
        self._mesh = mesh
        self._status = status

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self._models),
            web.get("/v1/models/{name:.+}", self._model),
            web.get("/health", self._health),
            web.get("/ready", self._ready),
            web.get("/ping", self._ping),
            web.get("/version", self._version),
            web.get("/metrics", self._metrics),
            web.get("/load", self._load),
        ]

    async def _served(self) -> list[Model]:
        model = await self._mesh.tokenizers.known_model()
        traits = ModelTraits(model.tool_parser, model.reasoning_parser, _pooled(model))
        return [Model(name, model.created, model.max_model_len, traits) for name in model.names]

    async def _models(self, request: web.Request) -> web.Response:
        served = await self._served()
        if is_anthropic(request):
            models = [anthropic_model(model) for model in served]
            return json_response(anthropic.ModelList(models, models[0].id, models[-1].id))
        return json_response(ModelList(served))

    async def _model(self, request: web.Request) -> web.Response:
        name, served = request.match_info["name"], await self._served()
        for model in served:
            if model.id == name:
                return json_response(anthropic_model(model) if is_anthropic(request) else model)
        raise unknown_model(name, [model.id for model in served])

    async def _health(self, request: web.Request) -> web.Response:
        """Can what is open be served? So it stays good while we drain."""
        return self._report({State.READY, State.DRAINING})

    async def _ready(self, request: web.Request) -> web.Response:
        """Should new requests come here?"""
        return self._report({State.READY})

    def _report(self, good: set[State]) -> web.Response:
        status = self._status()
        state = status.state.name.lower()
        return json_response(
            {"status": state, "reason": status.reason}, 200 if status.state in good else 503
        )

    async def _ping(self, request: web.Request) -> web.Response:
        return json_response({"status": "alive"})

    async def _version(self, request: web.Request) -> web.Response:
        return json_response({"version": VERSION})

    async def _metrics(self, request: web.Request) -> web.Response:
        body = generate_latest(registry_of(owner_of(request)))
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _load(self, request: web.Request) -> web.Response:
        """Open requests, in vLLM's format."""
        return json_response({"server_load": self._status().load})


def anthropic_model(model: Model) -> anthropic.Model:
    created_at = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    limit = model.max_model_len
    return anthropic.Model(model.id, model.id, created_at, limit, limit)


def _pooled(model: ModelInfo) -> PooledModel | UnsetType:
    if (pooling := model.pooling) is None:
        return UNSET
    return PooledModel(
        *(pooling.task, pooling.size, pooling.is_matryoshka, pooling.dimensions, pooling.labels)
    )
