"""Endpoints about the gateway and its model: models, health, version, load and metrics."""

from aiohttp import web
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.gateway.api import Api, Core
from services.gateway.chat.replies.openai import Model, ModelList, ModelTraits, PooledModel
from services.gateway.http.account import owner_of
from services.gateway.http.json_reply import json_response
from services.gateway.http.violations import unknown_model
from services.gateway.metrics import registry_of
from shared.version import VERSION
from shared.wire.messages import ModelInfo, State


class Info(Api):
    open_routes = "/health", "/ready", "/ping"
    cheap_routes = "/v1/models", "/v1/models/{name}", "/version", "/load", "/metrics", "/v1/metrics"

    def __init__(self, core: Core) -> None:
        self._mesh = core.mesh
        self._status = core.status
        self._apis = core.apis

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self._models),
            web.get("/v1/models/{name:.+}", self._model),
            web.get("/health", self._health),
            web.get("/ready", self._ready),
            web.get("/ping", self._ping),
            web.get("/version", self._version),
            web.get("/metrics", self._metrics),
            web.get("/v1/metrics", self._metrics),
            web.get("/load", self._load),
        ]

    async def _served(self) -> list[Model]:
        model = await self._mesh.tokenizers.known_model()
        traits = ModelTraits(model.tool_parser, model.reasoning_parser, _pooled(model))
        modalities = ["text", *model.all_media] if model.media else UNSET
        served = [
            Model(
                id=name,
                created=model.created,
                max_model_len=model.max_model_len,
                shoal=traits,
                input_modalities=modalities,
            )
            for name in model.names
        ]
        return served + [each for api in self._apis for each in api.variants(served[0])]

    async def _models(self, request: web.Request) -> web.Response:
        served = await self._served()
        replies = (api.models(request, served) for api in self._apis)
        return json_response(next(filter(None, replies), ModelList(served)))

    async def _model(self, request: web.Request) -> web.Response:
        name, served = request.match_info["name"], await self._served()
        for model in served:
            if model.id == name:
                replies = (api.model(request, model) for api in self._apis)
                return json_response(next(filter(None, replies), model))
        raise unknown_model(name, [model.id for model in served])

    async def _health(self, request: web.Request) -> web.Response:
        """Can open requests be served? A draining gateway is still healthy."""
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


def _pooled(model: ModelInfo) -> PooledModel | UnsetType:
    if (pooling := model.pooling) is None:
        return UNSET
    return PooledModel(
        *(pooling.task, pooling.size, pooling.is_matryoshka, pooling.dimensions, pooling.labels)
    )
