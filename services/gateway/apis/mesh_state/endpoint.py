"""``/v1/mesh``: all services of the mesh, their state and their connections."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from aiohttp import web
from msgspec import Struct

from services.gateway.api import Api, Core
from services.gateway.apis.mesh_state.mesh_services import (
    MeshService,
    Name,
    list_services,
    name_of,
)
from services.gateway.http.json_reply import json_response
from shared.link.peer import Peer
from shared.process.report import ask_all
from shared.wire.codec import Array
from shared.wire.messages import REPORT_MINOR, Message, ServiceName, ServiceReport

T = TypeVar("T")

ROUTE = "/v1/mesh"
ANSWER_S = 1.0  # a service without an answer by then hangs
MIN_PAUSE_S = 0.1
MEMORY_S = 30.0
MAX_SERVICES = 4096
# The services that each service asks in turn.
ASKED_BY: dict[ServiceName, set[ServiceName]] = {
    "gateway": {"tokenizer"},
    "tokenizer": {"scheduler", "gateway"},
    "scheduler": {"worker"},
    "worker": set(),
}


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


class Reports:
    """Asks the services of the mesh for their state. ``own`` makes this gateway's report,
    ``peers`` are its tokenizers."""

    def __init__(
        self, own: Callable[[], ServiceReport], peers: Callable[[], Iterable[Peer]]
    ) -> None:
        self._own = own
        self._peers = peers
        self._asked_s = float("-inf")
        self._received: dict[Name, tuple[float, ServiceReport]] = {}
        self._changed = asyncio.Event()
        self._listed: dict[Name, tuple[float, MeshService]] = {}  # when last

    def receive(self, report: ServiceReport) -> None:
        """Beyond ``MAX_SERVICES`` new services are ignored."""
        name = name_of(report)
        if name in self._received or len(self._received) < MAX_SERVICES:
            self._received[name] = time.monotonic(), report
        self._changed.set()
        self._changed = asyncio.Event()

    async def services(self) -> list[MeshService]:
        """All current services, and services lost in the last half a minute. Waits for all answers,
        but not longer than ``ANSWER_S``."""
        now_s = time.monotonic()
        if now_s - self._asked_s > MIN_PAUSE_S:
            self._asked_s = now_s
            ask_all(self._peers())
        asked_s = self._asked_s
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while self._missing(self._answers(asked_s)):
                    await self._changed.wait()
        return self._list(self._answers(asked_s))

    def _answers(self, asked_s: float) -> dict[Name, ServiceReport]:
        """The reports that are newer than the question, our own first."""
        own = self._own()
        answers = {
            name: report
            for name, (received_s, report) in self._received.items()
            if received_s >= asked_s
        }
        return {name_of(own): own, **answers}

    def _missing(self, answers: dict[Name, ServiceReport]) -> set[Name]:
        """Returns services asked, by us or by an answering service, that have not answered."""
        asked = {
            name_of(peer)
            for report in answers.values()
            for peer in report.peers
            if peer.service in ASKED_BY[report.service]
            and peer.minor >= REPORT_MINOR
            and not peer.ended
        }
        return asked - answers.keys()

    def _list(self, answers: dict[Name, ServiceReport]) -> list[MeshService]:
        now_s = time.monotonic()
        self._received = _recent(self._received, now_s)
        self._listed = _recent(self._listed, now_s)
        earlier = {name: service for name, (_, service) in self._listed.items()}
        services = list_services(answers, self._missing(answers), earlier)
        self._listed |= {
            (each.role, each.instance): (now_s, each) for each in services if each.is_known
        }
        return services


def _recent(dated: dict[Name, tuple[float, T]], now_s: float) -> dict[Name, tuple[float, T]]:
    return {name: each for name, each in dated.items() if now_s - each[0] <= MEMORY_S}
