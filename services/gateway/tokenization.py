"""``/tokenize`` and ``/detokenize``, in vLLM's shape."""

from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from services.gateway import unsupported
from services.gateway.admission import Admission
from services.gateway.body import BodyReader, parsed
from services.gateway.job import Prompt
from services.gateway.json_body import check, decode, served_name
from services.gateway.json_reply import json_response
from services.gateway.mesh import Mesh
from services.gateway.openai import DetokenizeReply, TokenizeReply
from services.gateway.prompts import chat_prompt, ids_prompt, text_prompt
from services.gateway.schema import DetokenizeRequest, TokenizeRequest
from services.gateway.violations import client_names
from shared.errors import InvalidRequest
from shared.messages import ModelInfo


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a client wants converted; ``field_names`` as in Job."""

    prompt: Prompt
    adds_special_tokens: bool
    returns_strings: bool
    field_names: Mapping[str, str]


class Tokenization:
    def __init__(self, mesh: Mesh, admission: Admission, bodies: BodyReader) -> None:
        self._mesh = mesh
        self._admission = admission
        self._bodies = bodies

    def routes(self) -> list[web.RouteDef]:
        expect = self._bodies.expect
        return [
            web.post("/tokenize", self._tokenize, expect_handler=expect),
            web.post("/detokenize", self._detokenize, expect_handler=expect),
        ]

    async def _tokenize(self, request: web.Request) -> web.Response:
        with self._admission.admit() as place:
            place.hold(self._bodies.bound(request))
            body, model = await self._bodies.read(request), await self._mesh.ready_model()
            conversion = await parsed(body, lambda body: parse_tokenize(body, model))
            place.is_served = True
            prompt = conversion.prompt
            with client_names(conversion.field_names):
                array = await self._mesh.convert(
                    prompt.kind, prompt.data, conversion.adds_special_tokens
                )
            ids: list[int] = array.tolist()
            strings = None
            if conversion.returns_strings:
                table = self._mesh.tokens
                strings = [table.text(token_id) for token_id in ids]
            return json_response(TokenizeReply(len(ids), model.max_model_len, ids, strings))

    async def _detokenize(self, request: web.Request) -> web.Response:
        with self._admission.admit() as place:
            place.hold(self._bodies.bound(request))
            body, model = await self._bodies.read(request), await self._mesh.ready_model()
            prompt = await parsed(body, lambda body: parse_detokenize(body, model))
            place.is_served = True
            with client_names({"prompt": "tokens"}):
                text = await self._mesh.convert(prompt.kind, prompt.data, False)
            return json_response(DetokenizeReply(text.tobytes().decode()))


def parse_tokenize(body: bytes, model: ModelInfo) -> Conversion:
    """A body of ``/tokenize``. Chat templates mostly write the special tokens, texts do not."""
    fields = decode(body)
    request = check(fields, TokenizeRequest, unsupported.TOKENIZE)
    served_name(request.model, model)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("either prompt or messages is required", param="prompt")
    adds_special_tokens = request.add_special_tokens
    if request.messages is not None:
        prompt, names = chat_prompt(fields["messages"], request.messages), {"prompt": "messages"}
        adds_special_tokens = bool(adds_special_tokens)
    else:
        prompt, names = text_prompt(request.prompt or ""), {}
        adds_special_tokens = adds_special_tokens is not False
    return Conversion(prompt, adds_special_tokens, bool(request.return_token_strs), names)


def parse_detokenize(body: bytes, model: ModelInfo) -> Prompt:
    """A body of ``/detokenize``."""
    request = check(decode(body), DetokenizeRequest, {})
    served_name(request.model, model)
    if len(request.tokens) > model.max_model_len:
        raise InvalidRequest(
            f"tokens has {len(request.tokens)} ids; the limit is max-model-len ="
            f" {model.max_model_len}",
            param="tokens",
        )
    return ids_prompt(request.tokens, model.vocab_size, "tokens")
