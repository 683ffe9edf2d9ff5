"""``/v1/mesh``: all services of the mesh, their state and their connections."""

import time

from aiohttp import web
from msgspec import Struct

from services.gateway.api import Api, Core
from services.gateway.http.json_reply import json_response
from services.gateway.mesh.mesh_services import MeshService

ROUTE = "/v1/mesh"


class MeshReply(Struct):
    object: str
    time: float
    services: list[MeshService]


class MeshState(Api):
    cheap_routes = (ROUTE,)

    def __init__(self, core: Core) -> None:
        self._reports = core.reports
        self._is_on = core.config.mesh_endpoint

    def routes(self) -> list[web.RouteDef]:
        return [web.get(ROUTE, self._mesh)] if self._is_on else []

    async def _mesh(self, request: web.Request) -> web.Response:
        services = await self._reports.services()
        return json_response(MeshReply("mesh", time.time(), services))
