"""``/abort_requests``: ends requests by their public ids. A client ends only requests of its own
API key; the answer for another key's request is the same as for an unknown one."""

from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct

from services.gateway.api import Api, Core
from services.gateway.chat.requests.json_body import check, decode
from services.gateway.http.account import owner_of
from services.gateway.http.body import BodyReader
from services.gateway.http.json_reply import json_response
from shared.wire.messages import MAX_NAME_CHARS

MAX_BODY_BYTES = 1 << 20
"""Enough for all ids; an abort is not subject to admission, since it makes room when there is
none."""

MAX_IDS = 1024
ROUTE = "/abort_requests"


class AbortRequest(Struct, kw_only=True):
    request_ids: Annotated[
        list[Annotated[str, Meta(max_length=MAX_NAME_CHARS)]], Meta(max_length=MAX_IDS)
    ]


class AbortReply(Struct):
    """``aborted`` were open in this gateway; ``forwarded`` may be open in another or in none."""

    aborted: list[str]
    forwarded: list[str]


class Aborts(Api):
    cheap_routes = (ROUTE,)

    def __init__(self, core: Core) -> None:
        self._mesh = core.mesh
        self._apis = core.apis
        self._bodies = BodyReader(MAX_BODY_BYTES)

    def routes(self) -> list[web.RouteDef]:
        return [web.post(ROUTE, self._abort)]

    async def _abort(self, request: web.Request) -> web.Response:
        body = await self._bodies.read(request)
        asked = check(decode(body), AbortRequest, {}).request_ids
        names = {name for public_id in asked for name in self._names(public_id)}
        ours = self._mesh.abort(names, owner_of(request))
        aborted = [public_id for public_id in asked if self._names(public_id) & ours]
        forwarded = [public_id for public_id in asked if not self._names(public_id) & ours]
        return json_response(AbortReply(aborted, forwarded))

    def _names(self, public_id: str) -> set[str]:
        """Clients see ids with the prefix of their endpoint, and may have sent them without it."""
        prefixes = (prefix for api in self._apis for prefix in api.id_prefixes)
        return {public_id, *map(public_id.removeprefix, prefixes)}
