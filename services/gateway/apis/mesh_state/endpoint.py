"""``/v1/mesh``: all services of the mesh, their state and their connections."""

import time
from collections.abc import Sequence

from aiohttp import web
from msgspec import Struct

from services.gateway.api import Api, Core
from services.gateway.apis.mesh_state.mesh_services import MeshService
from services.gateway.apis.mesh_state.reports import Reports
from services.gateway.http.json_reply import json_response
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.messages import Message, ServiceReport

ROUTE = "/v1/mesh"


class MeshReply(Struct):
    object: str
    time: float
    services: list[MeshService]


class MeshState(Api):
    cheap_routes = (ROUTE,)

    def __init__(self, core: Core) -> None:
        tokenizers = core.mesh.tokenizers
        self._reports = Reports(core.report, lambda: (each.peer for each in tokenizers))
        self._is_on = core.config.mesh_endpoint

    def routes(self) -> list[web.RouteDef]:
        return [web.get(ROUTE, self._mesh)] if self._is_on else []

    def takes(self, peer: Peer, message: Message, arrays: Sequence[Array] = ()) -> bool:
        if isinstance(message, ServiceReport):
            self._reports.receive(message)
        return isinstance(message, ServiceReport)

    async def _mesh(self, request: web.Request) -> web.Response:
        services = await self._reports.services()
        return json_response(MeshReply("mesh", time.time(), services))
