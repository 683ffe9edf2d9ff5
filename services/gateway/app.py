"""The gateway as an application of aiohttp: a list of APIs, and middleware for all requests."""

from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from services.gateway.api import Api, Core
from services.gateway.apis.aborts.endpoint import Aborts
from services.gateway.apis.adapters.endpoint import AdapterApi
from services.gateway.apis.batches.endpoint import BatchesApi
from services.gateway.apis.invocations.endpoint import Invocations
from services.gateway.apis.mesh_state.endpoint import MeshState
from services.gateway.apis.messages.endpoint import Messages
from services.gateway.apis.ops.info import Info
from services.gateway.apis.pooling.endpoint import PoolingEndpoints
from services.gateway.apis.responses.endpoint import Responses
from services.gateway.apis.tokenization.endpoint import Tokenization
from services.gateway.chat.completions import Completions
from services.gateway.chat.endpoint import Chat
from services.gateway.chat.intake import Intake
from services.gateway.chat.media import Media, no_media
from services.gateway.chat.structure import NoStructure, Structure
from services.gateway.http.admission import Admission
from services.gateway.http.api_keys import Guard, load_accounts
from services.gateway.http.body import BodyParser, BodyReader
from services.gateway.http.browsers import Cors, known_hosts
from services.gateway.http.failures import (
    add_error_shape,
    answer_errors,
    count_requests,
    name_server,
)
from services.gateway.http.head_parser import check_expectation
from services.gateway.http.pieces import PieceMaker
from services.gateway.http.request_id import name_response
from services.gateway.http.routes import UNKNOWN, Load
from services.gateway.http.server import check_head
from services.gateway.media.images import Images
from services.gateway.mesh.mesh import Mesh
from services.gateway.page.endpoint import Page
from services.gateway.text.structure import TextStructure
from services.gateway.traces.endpoint import Traces
from shared.settings.gateway import GatewayConfig
from shared.wire.envelope import Promise
from shared.wire.messages import Heartbeat, ServiceReport

MAKERS: tuple[Callable[[Core], Api], ...] = (
    Chat,
    Responses,
    PoolingEndpoints,
    Invocations,
    Tokenization,
    Messages,
    Aborts,
    Traces,
    BatchesApi,
    Info,
    MeshState,
    AdapterApi,
    Page,
)
STRUCTURES: tuple[Callable[[], Structure], ...] = (
    TextStructure,
    NoStructure,
)
MEDIA: tuple[Callable[[GatewayConfig], Media], ...] = (
    Images,
    no_media,
)
"""The first one of each serves."""
APIS: web.AppKey[list[Api]] = web.AppKey("apis")


def make_app(
    config: GatewayConfig,
    mesh: Mesh,
    admission: Admission,
    status: Callable[[], Heartbeat],
    report: Callable[[], ServiceReport],
    internal_socket: Path,
) -> web.Application:
    """Raises ConfigError."""
    bodies, parser, pieces = BodyReader(config.max_body_bytes), BodyParser(), PieceMaker()
    intake = Intake(
        mesh,
        admission,
        bodies,
        parser,
        shares_cache=config.share_prefix_cache,
        promise=Promise(ttft_ms=config.ttft_ms, tpot_ms=config.tpot_ms),
    )
    structure, media = STRUCTURES[0](), MEDIA[0](config)
    completions = Completions(mesh, intake, pieces, config, structure, media)
    core = Core(
        config=config,
        mesh=mesh,
        admission=admission,
        status=status,
        report=report,
        internal_socket=internal_socket,
        bodies=bodies,
        intake=intake,
        pieces=pieces,
        completions=completions,
        structure=structure,
        media=media,
    )
    core.apis.extend(make(core) for make in MAKERS)
    mesh.extensions = core.apis
    core.loads[UNKNOWN] = Load.CHEAP
    for api in core.apis:
        core.loads.update(api.loads())
    cors = Cors(config.allowed_origins)
    middlewares = [each.middleware for each in core.apis if each.middleware is not None]
    middlewares += [count_requests, answer_errors, check_head, cors.preflight]
    if accounts := load_accounts(config):
        middlewares.append(Guard(accounts, core.loads, internal_socket).check)
    else:
        hosts = known_hosts(config, internal_socket)
        middlewares += [cors.check, *([hosts.check] if hosts is not None else [])]
    middlewares.append(check_expectation)
    app = web.Application(middlewares=middlewares)
    app[APIS] = core.apis
    prepared = (each.prepare for each in core.apis if each.prepare is not None)
    for prepare in (name_response, name_server, *prepared, cors.mark):
        app.on_response_prepare.append(prepare)
    for api in core.apis:
        routes = [*api.routes()]
        app.add_routes(routes)
        core.posted.update((each.path, each.handler) for each in routes if each.method == "POST")
        if api.error_shape is not None:
            add_error_shape(api.error_shape)

    async def close(app: web.Application) -> None:
        parser.close()
        pieces.close()
        for api in core.apis:
            await api.close()

    app.on_cleanup.append(close)
    return app
