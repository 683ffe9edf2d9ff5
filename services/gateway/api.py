"""The seam between the gateway and its APIs."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from msgspec import Struct

from services.gateway.chat.completions import Completions
from services.gateway.chat.intake import Intake
from services.gateway.chat.media import Media
from services.gateway.chat.replies.openai import Model
from services.gateway.chat.structure import Structure
from services.gateway.http.admission import Admission
from services.gateway.http.body import BodyReader
from services.gateway.http.failures import ErrorShape
from services.gateway.http.pieces import PieceMaker
from services.gateway.http.routes import Load
from services.gateway.mesh.mesh import Mesh
from shared.link.extension import Extension
from shared.settings.gateway import GatewayConfig
from shared.wire.messages import Heartbeat, ServiceReport

Prepare = Callable[[web.BaseRequest, web.StreamResponse], Awaitable[None]]


class Api(Extension):
    """Endpoints, messages of tokenizers, and background work. An optional API is a folder and a
    line in ``app.py``."""

    open_routes: Sequence[str] = ()
    cheap_routes: Sequence[str] = ()
    generating_routes: Sequence[str] = ()
    """Routes of each ``Load``; the load of all others is work."""
    id_prefixes: Sequence[str] = ()
    """Prefixes of the ids that clients see of their requests."""
    error_shape: ErrorShape | None = None
    prepare: Prepare | None = None
    """Changes each response before its head is sent."""
    middleware: Middleware | None = None
    """Surrounds each request, with its errors."""

    def routes(self) -> Iterable[web.RouteDef]:
        return ()

    def loads(self) -> Mapping[str, Load]:
        return {
            **dict.fromkeys(self.open_routes, Load.OPEN),
            **dict.fromkeys(self.cheap_routes, Load.CHEAP),
            **dict.fromkeys(self.generating_routes, Load.GENERATION),
        }

    def variants(self, model: Model) -> Sequence[Model]:
        """Variants of the served model, for the list of models."""
        return ()

    def models(self, request: web.Request, served: Sequence[Model]) -> Struct | None:
        """The list of models in the API's own shape, for requests of its clients."""

    def model(self, request: web.Request, model: Model) -> Struct | None:
        """One model in the API's own shape."""

    async def run(self) -> None:
        """Works until cancelled, or until ``drain``."""

    async def drain(self) -> None:
        """Stops work that another gateway can continue."""

    async def close(self) -> None:
        """Called after the last request."""


@dataclass(frozen=True)
class Core:
    """Parts of a gateway that APIs share."""

    config: GatewayConfig
    mesh: Mesh
    admission: Admission
    status: Callable[[], Heartbeat]
    report: Callable[[], ServiceReport]
    internal_socket: Path
    bodies: BodyReader
    intake: Intake
    pieces: PieceMaker
    completions: Completions
    structure: Structure
    media: Media
    apis: list[Api] = field(default_factory=list)
    posted: dict[str, Handler] = field(default_factory=dict)
    """Handlers of POST, by path, of all APIs."""
    loads: dict[str, Load] = field(default_factory=dict)
    """Loads of routes, of all APIs."""
