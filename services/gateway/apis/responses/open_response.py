"""One request to ``/v1/responses`` and its reply."""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

from aiohttp import web

from services.gateway.apis.responses.background import Background
from services.gateway.apis.responses.replies.objects import ResponseObject
from services.gateway.apis.responses.replies.output_items import ItemShape
from services.gateway.apis.responses.replies.shown import begun_response, is_summary
from services.gateway.apis.responses.replies.writers import (
    ResponseBody,
    ResponseMaker,
    ResponseStream,
)
from services.gateway.apis.responses.requests.input_items import kept_input, references
from services.gateway.apis.responses.requests.parse import ItemRequest, read_request, response_job
from services.gateway.apis.responses.requests.reasoning_cipher import ReasoningCipher
from services.gateway.apis.responses.requests.schema import ENCRYPTED_REASONING, ResponseRequest
from services.gateway.apis.responses.store.database import Entry
from services.gateway.apis.responses.store.response_store import ResponseStore
from services.gateway.chat.media import Media
from services.gateway.chat.replies.choice_parser import ChoiceParser
from services.gateway.chat.replies.formats import ChatFormat
from services.gateway.chat.replies.reply import Head, Reply
from services.gateway.chat.replies.writers import BodyWriter, StreamWriter
from services.gateway.chat.requests.parse import Limits
from services.gateway.chat.requests.unsupported import unsupported
from services.gateway.http.body import Body, BodyParser
from services.gateway.http.json_reply import encode, json_response
from services.gateway.http.violations import show
from services.gateway.mesh.job import Job
from shared.errors import InvalidRequest
from shared.wire.messages import ModelInfo

RESPONSE_PREFIX = "resp_"
NO_STORE = "there is no response-store (--response-store FILE)"


class OpenResponse:
    """A GenerationEndpoint. ``owner`` is the owner of its API key; in the mesh its name is
    ``request_id``; ``has_ended`` is set once it no longer changes. ``background`` makes background
    responses later; without it a request that asks for the background is made now, with its
    existing ``response_id`` and time."""

    format = ChatFormat()

    def __init__(
        self,
        store: ResponseStore,
        cipher: ReasoningCipher,
        owner: str,
        background: Background | None,
        response_id: str | None = None,
        created_s: int | None = None,
    ) -> None:
        self.owner = owner
        self.request_id = ""
        self.has_ended = asyncio.Event()
        self._store = store
        self._cipher = cipher
        self._background = background
        self._created_s = created_s
        self._body = b""  # until the response can be made
        self._key = response_id.removeprefix(RESPONSE_PREFIX) if response_id else uuid.uuid4().hex
        self._request: ItemRequest | None = None
        self._is_stored = False
        self._input = b""  # the stored part of the input
        self._maker: ResponseMaker | None = None

    @property
    def id(self) -> str:
        return RESPONSE_PREFIX + self._key

    @property
    def response(self) -> ResponseObject | None:
        """The response in its present state; None before it is accepted."""
        return self._maker.response if self._maker is not None else None

    def reply_id(self, request_id: str) -> str:
        """Never the client's own id, which may come twice."""
        self.request_id = request_id
        return self.id

    async def job(self, body: Body, model: ModelInfo, limits: Limits, parser: BodyParser) -> Job:
        request, asked = await parser.parse(body, lambda body: _read(body, limits.media))
        self._request = request
        self._check_store(request)
        known = await self._referred(asked)
        before = await self._history(request)
        self._is_stored = self._store.is_there and request.fields.store is not False

        def made(_: Body) -> tuple[Job, bytes]:
            items = _in_place(request.items, asked, known)
            job = response_job(request, [*before, *items], self._decrypt, model, limits)
            return job, kept_input(items, self._key) if self._is_stored else b""

        num_more_bytes = sum(map(len, (*before, *known.values())))
        job, self._input = await parser.parse(body, made, num_more_bytes)
        if self._is_later:
            self._body = bytes(body)
        request.items.clear()
        return replace(
            job,
            request_id=job.request_id or self._key,
            kept_bytes=len(self._input),
            keeps_logprobs=True,
        )

    def stream_writer(self, reply: Reply, parsers: Sequence[ChoiceParser]) -> StreamWriter:
        return ResponseStream(self._new_maker(reply, *parsers))

    def body_writer(self, reply: Reply, parsers: Sequence[ChoiceParser]) -> BodyWriter:
        return ResponseBody(self._new_maker(reply, *parsers))

    async def answer_early(
        self, request_id: str, job: Job, model: ModelInfo
    ) -> web.Response | None:
        """A background request is answered with the queued response."""
        if not self._is_later:
            return None
        assert self._background is not None
        assert self._request is not None
        self._background.check_room(self.owner, len(self._body))
        head = Head(self.id, int(time.time()), job.model, model.fingerprint)
        response = begun_response(self._request, job, head, is_stored=True, status="queued")
        await self._background.start(self._entry(response), request_id, self._body)
        return json_response(response)

    async def keep(self) -> None:
        if not self._is_stored or self._maker is None:
            return
        response = self._maker.response
        save = self._store.finish if response.background else self._store.save
        await save(self._entry(response))

    def _entry(self, response: ResponseObject) -> Entry:
        item_ids = [item.id for item in response.output]
        previous_id = response.previous_response_id
        return Entry(
            id=self.id,
            owner=self.owner,
            previous_id=previous_id,
            input=self._input,
            response=encode(response),
            item_ids=item_ids,
        )

    @property
    def _is_later(self) -> bool:
        is_asked = self._request is not None and self._request.fields.background
        return bool(is_asked) and self._background is not None

    def _new_maker(self, reply: Reply, parser: ChoiceParser) -> ResponseMaker:
        request = self._request
        assert request is not None
        encrypts = request.fields.includes(ENCRYPTED_REASONING)
        shape = ItemShape(
            self._key,
            request.tools,
            is_summary(request),
            self._encrypt if encrypts else None,
        )
        head = replace(reply.head, created=self._created_s or reply.head.created)
        response = begun_response(request, reply.job, head, self._is_stored)
        self._maker = ResponseMaker(reply, parser, shape, response)
        return self._maker

    def _encrypt(self, text: str) -> str:
        return self._cipher.encrypt(text, self.owner)

    def _decrypt(self, content: str) -> str | None:
        return self._cipher.decrypt(content, self.owner)

    def _check_store(self, request: ItemRequest) -> None:
        """Raises InvalidRequest for fields that need a store."""
        fields = request.fields
        if fields.background:
            self._check_background(fields)
        if self._store.is_there:
            return
        if fields.store:
            raise unsupported("store", True, f"null or false; {NO_STORE}")
        if fields.previous_response_id is not None:
            raise unsupported(
                "previous_response_id",
                fields.previous_response_id,
                f"null; {NO_STORE}",
            )

    def _check_background(self, fields: ResponseRequest) -> None:
        """Raises InvalidRequest."""
        if not self._store.is_there:
            raise unsupported(
                "background",
                True,
                f"null or false; {NO_STORE}",
            )
        if fields.store is False:
            raise unsupported("store", False, "null or true with background")
        if fields.stream:
            raise unsupported("stream", True, "null or false with background")

    async def _history(self, request: ItemRequest) -> list[bytes]:
        """The items of the conversation before this request."""
        previous_id = request.fields.previous_response_id
        if previous_id is None:
            return []
        return await self._store.conversation(previous_id, self.owner)

    async def _referred(self, asked: Mapping[int, str]) -> dict[str, bytes]:
        """The items given only by reference, by their ids. Raises InvalidRequest."""
        known: dict[str, bytes] = {}
        if asked and self._store.is_there:
            known = await self._store.items({*asked.values()}, self.owner)
        for index, item_id in asked.items():
            if item_id not in known:
                param = f"input[{index}].id"
                raise InvalidRequest(
                    f"{param} is {show(item_id)}; no such item is here", param=param
                )
        return known


def _read(body: Body, media: Media) -> tuple[ItemRequest, dict[int, str]]:
    """The request, and the ids of the items given only by reference, by their places."""
    request = read_request(body, media)
    return request, references(request.items)


def _in_place(
    items: list[bytes], asked: Mapping[int, str], known: Mapping[str, bytes]
) -> list[bytes]:
    """The items, with ``known`` ones in place of references to them."""
    return [known[asked[index]] if index in asked else item for index, item in enumerate(items)]
