"""``/v1/responses``: makes responses, and returns stored ones."""

import asyncio
import re
from dataclasses import dataclass

import msgspec
from aiohttp import web
from msgspec import Raw

from services.gateway.api import Api, Core
from services.gateway.apis.responses.background import LOOK_S, Background
from services.gateway.apis.responses.open_response import RESPONSE_PREFIX, OpenResponse
from services.gateway.apis.responses.replies.objects import ResponseObject
from services.gateway.apis.responses.requests.reasoning_cipher import ReasoningCipher
from services.gateway.apis.responses.store.response_store import ResponseStore, missing
from services.gateway.chat.requests.unsupported import unsupported
from services.gateway.http.account import owner_of
from services.gateway.http.internal_socket import RESPONSE_HEADER, is_own
from services.gateway.http.json_reply import json_response
from services.gateway.http.violations import show
from shared.errors import InvalidRequest

ROUTE = "/v1/responses"
MAX_LISTED = 100
NUM_LISTED = 20


class ItemList(msgspec.Struct):
    data: list[Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Deleted(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"


@dataclass(frozen=True)
class Listing:
    """The requested items of a list: ``limit`` items after the one with the id ``after``, the last
    first unless it ``ascends``."""

    limit: int
    after: str | None
    ascends: bool


class _Head(msgspec.Struct):
    id: str


class Responses(Api):
    generating_routes = (ROUTE,)
    cheap_routes = (f"{ROUTE}/{{response_id}}/cancel",)
    id_prefixes = (RESPONSE_PREFIX,)

    def __init__(self, core: Core) -> None:
        """Raises ConfigError if the store cannot be opened."""
        self._completions = core.completions
        self._mesh = core.mesh
        self._bodies = core.bodies
        config, self._internal_socket = core.config, core.internal_socket
        secret = config.reasoning_key
        self._cipher = ReasoningCipher(secret.get_secret_value() if secret is not None else None)
        self._store = ResponseStore(config)
        self._open: dict[str, OpenResponse] = {}
        limits = (config.max_background_responses, config.max_body_bytes)
        self._background = Background(
            self._store, self._internal_socket, *limits, self._so_far, self._abort
        )

    def routes(self) -> list[web.RouteDef]:
        one = ROUTE + "/{response_id}"
        return [
            web.post(ROUTE, self._create),
            web.post(f"{ROUTE}/input_tokens", self._count),
            web.get(one, self._get),
            web.delete(one, self._delete),
            web.post(f"{one}/cancel", self._cancel),
            web.get(f"{one}/input_items", self._list_input),
        ]

    async def close(self) -> None:
        await self._background.close()
        self._store.close()

    def _new(self, request: web.Request) -> OpenResponse:
        response_id, owner, background = None, owner_of(request), self._background
        if is_own(request, self._internal_socket):
            response_id = request.headers.get(RESPONSE_HEADER)
        if response_id is None:
            return OpenResponse(self._store, self._cipher, owner, background)
        created_s = background.created_s(response_id)
        return OpenResponse(
            store=self._store,
            cipher=self._cipher,
            owner=owner,
            background=None,
            response_id=response_id,
            created_s=created_s,
        )

    def _so_far(self, response_id: str) -> ResponseObject | None:
        found = self._open.get(response_id)
        return found.response if found is not None else None

    def _abort(self, response_id: str) -> bool:
        """Whether the mesh is making this response; it then ends."""
        found = self._open.get(response_id)
        if found is None or not found.request_id:
            return False
        self._mesh.abort({found.request_id}, found.owner)
        return True

    async def _create(self, request: web.Request) -> web.StreamResponse:
        response = self._new(request)
        self._open[response.id] = response
        try:
            return await self._completions.serve(request, response)
        finally:
            del self._open[response.id]
            response.has_ended.set()

    async def _count(self, request: web.Request) -> web.Response:
        num_tokens = await self._completions.count(request, self._new(request))
        return json_response(InputTokens(num_tokens))

    async def _get(self, request: web.Request) -> web.Response:
        """An unfinished response is returned in its present state."""
        if request.query.get("stream", "false") != "false":
            raise unsupported("stream", request.query["stream"], "false")
        response_id, owner = _asked(request)
        if (found := self._running(response_id, owner)) is not None and found.response is not None:
            return json_response(found.response)
        entry = await self._store.get(response_id, owner)
        return web.Response(body=entry.response, content_type="application/json")

    async def _delete(self, request: web.Request) -> web.Response:
        response_id, owner = _asked(request)
        await self._store.delete(response_id, owner)
        return json_response(Deleted(response_id))

    async def _cancel(self, request: web.Request) -> web.Response:
        """Ends a response that this gateway is making, or any gateway in the background; returns
        its state."""
        response_id, owner = _asked(request)
        found = self._running(response_id, owner)
        if found is None or found.response is None:
            return await self._cancel_in_background(response_id, owner)
        self._abort(response_id)
        await found.has_ended.wait()
        if found.response is None:
            raise missing(response_id)
        return json_response(found.response)

    async def _cancel_in_background(self, response_id: str, owner: str) -> web.Response:
        entry = await self._store.get(response_id, owner)
        if entry.runner is None:
            raise InvalidRequest(
                f"response {show(response_id)} has ended", param="response_id", code="has_ended"
            )
        await self._store.cancel(response_id)
        while entry.runner is not None:
            await asyncio.sleep(LOOK_S)
            entry = await self._store.get(response_id, owner)
        return web.Response(body=entry.response, content_type="application/json")

    async def _list_input(self, request: web.Request) -> web.Response:
        listing = _listing(request)
        response_id, owner = _asked(request)
        entry = await self._store.get(response_id, owner)
        items = msgspec.json.decode(entry.input, type=list[Raw])
        return json_response(listed(items, listing))

    def _running(self, response_id: str, owner: str) -> OpenResponse | None:
        found = self._open.get(response_id)
        return found if found is not None and found.owner == owner else None


def _asked(request: web.Request) -> tuple[str, str]:
    return request.match_info["response_id"], owner_of(request)


def _listing(request: web.Request) -> Listing:
    """Raises InvalidRequest."""
    query = request.query
    order, limit = query.get("order", "desc"), query.get("limit", str(NUM_LISTED))
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {show(order)}; expected asc or desc", param="order")
    if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= MAX_LISTED:
        raise InvalidRequest(f"limit is {show(limit)}; expected 1 to {MAX_LISTED}", param="limit")
    return Listing(int(limit), query.get("after"), order == "asc")


def listed(items: list[Raw], listing: Listing) -> ItemList:
    """Raises InvalidRequest."""
    items = items if listing.ascends else items[::-1]
    ids = [msgspec.json.decode(item, type=_Head).id for item in items]
    first = 0
    if listing.after is not None:
        if listing.after not in ids:
            shown = show(listing.after)
            raise InvalidRequest(f"after is {shown}; no item has this id", param="after")
        first = ids.index(listing.after) + 1
    last = min(first + listing.limit, len(items))
    page = ids[first:last]
    return ItemList(
        items[first:last], page[0] if page else None, page[-1] if page else None, last < len(items)
    )
