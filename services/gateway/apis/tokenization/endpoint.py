"""``/tokenize`` and ``/detokenize``, in vLLM's shape."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from aiohttp import web

from services.gateway.api import Api, Core
from services.gateway.apis.tokenization.reply import write_tokens
from services.gateway.apis.tokenization.requests import (
    Conversion,
    parse_detokenize,
    parse_tokenize,
)
from services.gateway.chat.requests.token_ids import check_length
from services.gateway.http.account import owner_of
from services.gateway.http.admission import Reservation
from services.gateway.http.body import Body
from services.gateway.http.json_reply import json_response
from services.gateway.http.violations import client_names
from services.gateway.mesh.job import Prompt, chat_bytes
from shared.wire.codec import Array
from shared.wire.messages import ConvertedTo, ModelInfo


class Tokenization(Api):
    def __init__(self, core: Core) -> None:
        self._mesh = core.mesh
        self._shows_info = core.config.enable_tokenizer_info_endpoint
        self._media = core.media
        self._intake = core.intake
        self._pieces = core.pieces

    def routes(self) -> list[web.RouteDef]:
        routes = [
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
        ]
        return [*routes, web.get("/tokenizer_info", self._info)] if self._shows_info else routes

    async def _info(self, request: web.Request) -> web.Response:
        """The model's own description of its tokenizer, as in tokenizer_config.json."""
        with self._intake.admission.admit() as reservation:
            await self._mesh.tokenizers.ready_model()
            reservation.is_served = True
            config = await self._mesh.conversions.convert(
                owner_of(request), Prompt("text", np.zeros(0, np.uint8)), False, to="tokenizer"
            )
            return web.Response(body=config.tobytes(), content_type="application/json")

    async def _tokenize(self, request: web.Request) -> web.Response:
        with self._intake.admission.admit() as reservation:
            parse = partial(parse_tokenize, media=self._media)
            conversion, model = await self._parsed(request, parse, reservation)
            ids = await self._converted(request, conversion, "ids", reservation)
            table = offsets = None
            if conversion.returns_strings:
                check_length(len(ids), model, conversion.param)
                table = self._mesh.tokens
            if conversion.returns_offsets:
                offsets = await self._converted(request, conversion, "offsets", reservation)
            written = write_tokens(ids, model.max_model_len, table, offsets)
            body = await self._pieces.join(written)
            return web.Response(body=body, content_type="application/json")

    async def _detokenize(self, request: web.Request) -> web.Response:
        with self._intake.admission.admit() as reservation:
            conversion, _ = await self._parsed(request, parse_detokenize, reservation)
            text = await self._converted(request, conversion, "text", reservation)
            return json_response({"prompt": text.tobytes().decode()})

    async def _parsed(
        self,
        request: web.Request,
        parse: Callable[[Body, ModelInfo], Conversion],
        reservation: Reservation,
    ) -> tuple[Conversion, ModelInfo]:
        conversion, model = await self._intake.parsed(
            request,
            reservation,
            parse,
            lambda found: found.prompt.num_bytes + chat_bytes(found.chat),
        )
        reservation.is_served = True
        [prompt] = await self._media.loaded([conversion.prompt], owner_of(request), reservation)
        return replace(conversion, prompt=prompt), model

    async def _converted(
        self,
        request: web.Request,
        conversion: Conversion,
        to: ConvertedTo,
        reservation: Reservation,
    ) -> Array:
        with client_names({"prompt": conversion.param}):
            array = await self._mesh.conversions.convert(
                owner=owner_of(request),
                prompt=conversion.prompt,
                adds_special_tokens=conversion.adds_special_tokens,
                chat=conversion.chat,
                to=to,
                max_prompt_tokens=conversion.max_prompt_tokens,
                keeps_prompt_start=conversion.keeps_prompt_start,
            )
        reservation.grow(array.nbytes)
        return array
