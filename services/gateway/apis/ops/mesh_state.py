"""``/v1/mesh``: all services of the mesh, how they fare and who is connected to whom."""

import time

from aiohttp import web
from msgspec import Struct

from services.gateway.http.json_reply import json_response
from services.gateway.mesh.mesh_services import MeshService
from services.gateway.mesh.reports import Reports


class MeshReply(Struct):
    object: str
    time: float
    services: list[MeshService]


class MeshState:
    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/mesh", self._mesh)]

    async def _mesh(self, request: web.Request) -> web.Response:
        services = await self._reports.services()
        return json_response(MeshReply("mesh", time.time(), services))
