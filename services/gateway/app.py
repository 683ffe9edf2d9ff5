"""The routes of a gateway."""

from collections.abc import Callable

from aiohttp import web

from services.gateway.admission import Admission
from services.gateway.body import BodyReader
from services.gateway.completions import Completions
from services.gateway.failures import answer_errors, count_requests, name_response
from services.gateway.info import Info
from services.gateway.mesh import Mesh
from shared.config import GatewayConfig
from shared.messages import Heartbeat


def make_app(
    config: GatewayConfig, mesh: Mesh, admission: Admission, status: Callable[[], Heartbeat]
) -> web.Application:
    bodies = BodyReader(config.max_body_bytes)
    completions = Completions(mesh, admission, bodies, config.accept_timeout_s)
    app = web.Application(
        client_max_size=config.max_body_bytes, middlewares=[count_requests, answer_errors]
    )
    app.on_response_prepare.append(name_response)
    app.add_routes(
        [
            web.post("/v1/chat/completions", completions.chat, expect_handler=bodies.expect),
            web.post("/v1/completions", completions.text, expect_handler=bodies.expect),
            *Info(mesh, status).routes(),
        ]
    )
    return app
