"""The admin port of a service: health, readiness, status and metrics, for people and machines."""

import os
from collections.abc import Awaitable, Callable
from hmac import compare_digest
from typing import Protocol, Self, runtime_checkable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from shared.link.address import admin_path, checked
from shared.link.peer import Handler
from shared.process.metrics import show_service
from shared.process.report import is_fit, state_of
from shared.settings.base import Settings
from shared.wire.messages import ServiceName, Stats

Command = Callable[[], None]
COMMAND_HEADER = "X-Shoal-Admin"  # browsers do not send it across sites without permission


@runtime_checkable
class HasCommands(Protocol):
    """A service with commands at its admin port."""

    def commands(self) -> dict[str, Command]:
        """The actions of ``POST /name``."""


@runtime_checkable
class HasDetails(Protocol):
    """A service with further details in its status."""

    def details(self) -> Stats: ...


class AdminServer:
    """Serves on ``admin_host:admin_port``, or without a port on a unix socket in the mesh
    directory.

    ``/ready`` is 503 with the reason while the service can neither work nor stand by. ``/health``
    is 503 only until the service was ready once, and later answers while the event loop runs.
    ``/status`` is JSON; ``/metrics`` is Prometheus text. Commands need the ``admin_token`` if it is
    set.
    """

    def __init__(self, handler: Handler, service: ServiceName, config: Settings) -> None:
        self._handler = handler
        self._service = service
        self._config = config
        self.has_started = False
        self._path = admin_path(config.mesh_dir, service, config.instance)
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        if isinstance(handler, HasCommands):
            for name, command in handler.commands().items():
                app.router.add_post(f"/{name}", self._command_handler(command))
        self._runner = web.AppRunner(app, access_log=None)
        show_service(service, config.instance, lambda: is_fit(handler))

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await self._site().start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()
        self._path.unlink(missing_ok=True)

    def _site(self) -> web.BaseSite:
        if self._config.admin_port is not None:
            return web.TCPSite(self._runner, self._config.admin_host, self._config.admin_port)
        return web.UnixSite(self._runner, str(checked(self._path)))

    async def _health(self, request: web.Request) -> web.Response:
        status = self._handler.status()
        if self.has_started or is_fit(self._handler):
            return web.json_response({"status": "ok"})
        return web.json_response({"status": "starting", "reason": status.reason}, status=503)

    async def _ready(self, request: web.Request) -> web.Response:
        status = self._handler.status()
        is_ready = is_fit(self._handler)
        body = {"ready": is_ready, "reason": status.reason}
        return web.json_response(body, status=200 if is_ready else 503)

    async def _status(self, request: web.Request) -> web.Response:
        status = self._handler.status()
        return web.json_response(
            {
                "service": self._service,
                "instance": self._config.instance,
                "pid": os.getpid(),
                "state": state_of(self._handler).name.lower(),
                "reason": status.reason,
                "load": status.load,
                "num_steps": status.num_steps,
                "details": self._handler.details() if isinstance(self._handler, HasDetails) else {},
            }
        )

    def _command_handler(
        self, command: Command
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            refusal = self._refusal(request)
            if refusal is None:
                command()
            return refusal or web.Response()

        return handle

    def _refusal(self, request: web.Request) -> web.Response | None:
        if request.headers.get(COMMAND_HEADER) != "1":
            return web.json_response({"error": f"{COMMAND_HEADER}: 1 is missing"}, status=403)
        token = self._config.admin_token
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if token and not compare_digest(given, f"Bearer {token.get_secret_value()}".encode()):
            return web.json_response({"error": "the admin-token is missing"}, status=401)
        return None

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})
