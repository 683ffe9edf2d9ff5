"""The routes of a gateway."""

from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from services.gateway.apis.batches.endpoint import Batches
from services.gateway.apis.batches.files import Files
from services.gateway.apis.batches.runner import BatchRunner
from services.gateway.apis.messages.client import name_message
from services.gateway.apis.messages.endpoint import Messages
from services.gateway.apis.ops.aborts import Aborts
from services.gateway.apis.ops.info import Info
from services.gateway.apis.ops.invocations import Invocations
from services.gateway.apis.ops.mesh_state import MeshState
from services.gateway.apis.ops.tokenization import Tokenization
from services.gateway.apis.pooling.endpoint import PoolingEndpoints
from services.gateway.apis.responses.endpoint import Responses
from services.gateway.chat.completions import Completions
from services.gateway.chat.intake import Intake
from services.gateway.http.admission import Admission
from services.gateway.http.api_keys import Guard, load_accounts
from services.gateway.http.body import BodyParser, BodyReader
from services.gateway.http.cors import Cors
from services.gateway.http.expectation import check_expectation
from services.gateway.http.failures import answer_errors, count_requests, name_server
from services.gateway.http.known_hosts import known_hosts
from services.gateway.http.pieces import PieceMaker
from services.gateway.http.request_id import name_response
from services.gateway.http.server import check_head
from services.gateway.mesh.mesh import Mesh
from services.gateway.mesh.reports import Reports
from services.gateway.page.endpoint import Page
from services.gateway.traces.endpoint import Traces
from services.gateway.traces.tracing import Tracing, answer_trace
from shared.settings.gateway import GatewayConfig
from shared.wire.messages import Heartbeat


def make_app(
    config: GatewayConfig,
    mesh: Mesh,
    admission: Admission,
    status: Callable[[], Heartbeat],
    reports: Reports,
    batches: BatchRunner | None = None,
    own_socket: Path | None = None,
) -> web.Application:
    bodies, parser = BodyReader(config.max_body_bytes), BodyParser()
    shares_cache = config.share_prefix_cache
    intake = Intake(mesh, admission, bodies, parser, shares_cache=shares_cache)
    pieces = PieceMaker()
    completions = Completions(mesh, intake, pieces, config)
    cors = Cors(config.allowed_origins)
    tracing = Tracing(mesh.traces)
    middlewares = [tracing.trace, count_requests, answer_errors, check_head, cors.preflight]
    if accounts := load_accounts(config):
        middlewares.append(Guard(accounts, own_socket).check)
    else:
        hosts = known_hosts(config, own_socket)
        middlewares += [cors.check, *([hosts.check] if hosts is not None else [])]
    middlewares.append(check_expectation)
    responses = Responses(completions, mesh, bodies, config, own_socket)
    pooling = PoolingEndpoints(mesh, intake, pieces, config)
    app = web.Application(middlewares=middlewares)
    app.on_response_prepare.append(name_response)
    app.on_response_prepare.append(name_server)
    app.on_response_prepare.append(name_message)
    app.on_response_prepare.append(answer_trace)
    app.on_response_prepare.append(cors.mark)

    async def close(app: web.Application) -> None:
        parser.close()
        pieces.close()
        await responses.close()

    app.on_cleanup.append(close)
    for part in (
        completions,
        responses,
        pooling,
        Invocations(mesh, intake, completions, pooling),
        Tokenization(mesh, intake, pieces, config),
        Messages(mesh, intake, completions),
        Aborts(mesh),
        Traces(mesh.traces),
        Files(batches, admission, config),
        Batches(batches),
        Info(mesh, status),
        *((MeshState(reports),) if config.mesh_endpoint else ()),
        *((Page(),) if config.page else ()),
    ):
        app.add_routes(part.routes())
    return app
