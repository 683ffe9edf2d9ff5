"""The gateway as a service: HTTP above, tokenizers below."""

import asyncio
import logging
import ssl
from pathlib import Path

from aiohttp import web
from prometheus_client import REGISTRY

from services.gateway.app import APIS, make_app
from services.gateway.http.admission import Admission
from services.gateway.http.server import HttpRunner, HttpSite
from services.gateway.mesh.mesh import Mesh
from services.gateway.mesh.tokenizers import MeshMetrics
from shared.errors import ConfigError
from shared.link.address import checked, socket_path
from shared.link.keys import load_keys
from shared.link.link import Link
from shared.link.peer import Peer
from shared.link.tcp import BACKLOG, url_host
from shared.process.report import make_report
from shared.settings.gateway import GatewayConfig
from shared.wire.codec import Array
from shared.wire.messages import (
    MAX_REASON_CHARS,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Heartbeat,
    Hello,
    Inquire,
    Message,
    ServiceReport,
    State,
)

log = logging.getLogger(__name__)

LAME_DUCK_S = 2.0
"""Time a draining gateway still accepts requests, so that load balancers notice it first."""


class GatewayService:
    """Serves OpenAI's API on ``config.host`` and ``config.port`` through any number of
    tokenizers."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._tls = tls_context(config)
        self._is_draining = False
        self._mesh = Mesh(config.replay_s, config.ready_wait_s, config.accept_timeout_s)
        self._admission = Admission(config.max_open_requests, config.max_buffered_bytes)
        self._internal_socket = checked(
            socket_path(config.mesh_dir, "gateway", config.instance, "own")
        )
        app = make_app(
            config=config,
            mesh=self._mesh,
            admission=self._admission,
            status=self.status,
            report=self._report,
            internal_socket=self._internal_socket,
        )
        self._apis = app[APIS]
        self._runner = HttpRunner(app, config)
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "gateway", config.instance)
        self.link = Link(hello, self, load_keys(config.keys, "gateway"))
        self.link.dial("tokenizer", config.mesh_dir, tcp=config.tokenizer_address)

    @property
    def port(self) -> int:
        """The port we listen on, chosen by the kernel if the setting is 0; 0: none."""
        ports = [each[1] for each in self._runner.addresses if isinstance(each, tuple)]
        return ports[0] if ports else 0

    async def run(self) -> None:
        """Serves until cancelled. Raises ConfigError if the port cannot be opened."""
        await self._runner.setup()
        mesh_metrics = MeshMetrics(self._mesh.tokenizers)
        REGISTRY.register(mesh_metrics)
        try:
            await self._listen()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._mesh.run())
                for api in self._apis:
                    tasks.create_task(api.run())
                await self.link.run()
        finally:
            REGISTRY.unregister(mesh_metrics)
            self._mesh.fail_all("the server stops")
            await self._runner.cleanup()
            self._internal_socket.unlink(missing_ok=True)
            await self.link.close("the gateway ends", is_planned=self._is_draining)

    async def drain(self) -> None:
        self._is_draining = True
        self.link.send_status()
        for api in self._apis:
            await api.drain()
        await asyncio.sleep(LAME_DUCK_S)
        await self._stop_listening()
        await self._admission.idle()

    def status(self) -> Heartbeat:
        unready_reason = self._mesh.tokenizers.unready_reason
        if self._is_draining:
            state, reason = State.DRAINING, "finishing open requests"
        elif unready_reason:
            state, reason = State.NOT_READY, unready_reason[:MAX_REASON_CHARS]
        else:
            state, reason = State.READY, ""
        return Heartbeat(state, reason, self._admission.num_open, num_steps=0)

    def _report(self) -> ServiceReport:
        return make_report(self.link, {"open_requests": self._admission.num_open})

    def refusal(self, hello: Hello) -> str | None:
        return self._mesh.tokenizers.refusal(hello)

    def on_up(self, peer: Peer) -> None:
        self._mesh.on_up(peer)

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        match message:
            case Inquire():
                peer.send(self._report())
            case _:
                self._mesh.on_message(peer, message, arrays)

    def on_down(self, peer: Peer, reason: str) -> None:
        self._mesh.on_down(peer, reason)

    async def _listen(self) -> None:
        await self._listen_on(self._internal_socket)
        if self._config.uds is not None:
            try:
                await self._listen_on(self._config.uds)
            except OSError as error:
                text = f"uds: cannot listen on {self._config.uds}: {error}"
                raise ConfigError(text) from None
            log.info("listening on %s", self._config.uds)
            return
        host, port = self._config.host, self._config.port
        try:
            await HttpSite(self._runner, self._config, self._tls).start()
        except OSError as error:
            raise ConfigError(f"host, port: cannot listen on {host}:{port}: {error}") from None
        scheme = "https" if self._tls else "http"
        log.info("listening on %s://%s:%d", scheme, url_host(host), self.port)

    async def _listen_on(self, path: Path) -> None:
        await web.UnixSite(self._runner, path, backlog=BACKLOG).start()

    async def _stop_listening(self) -> None:
        for site in self._runner.sites:
            await site.stop()
        if self._runner.server is not None:
            self._runner.server.pre_shutdown()


def tls_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """None without a certificate. Raises ConfigError for files without a certificate and its
    key."""
    certificate, key = config.ssl_certfile, config.ssl_keyfile
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # A server in the background cannot ask for a password.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except OSError as error:  # ssl.SSLError is one
        files = certificate if key is None else f"{certificate}, {key}"
        text = error.strerror if error.strerror and error.filename is None else str(error)
        raise ConfigError(f"ssl-certfile, ssl-keyfile: {files}: {text}") from None
    return context
