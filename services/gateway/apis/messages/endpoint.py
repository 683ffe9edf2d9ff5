"""``/v1/messages`` and ``/v1/messages/count_tokens``, in Anthropic's shape."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from aiohttp import web

from services.gateway.api import Api, Core
from services.gateway.apis.messages.replies import objects
from services.gateway.apis.messages.replies.errors import anthropic_error, anthropic_status
from services.gateway.apis.messages.replies.objects import TokenCount
from services.gateway.apis.messages.replies.writers import ID_PREFIX, MessageEvents, WholeMessage
from services.gateway.apis.messages.requests.parse import parse_messages, parse_prompt
from services.gateway.chat.replies.choice_parser import ChoiceParser
from services.gateway.chat.replies.formats import ChatFormat
from services.gateway.chat.replies.openai import Model
from services.gateway.chat.replies.reply import Reply
from services.gateway.chat.requests.chat_options import chat_options
from services.gateway.chat.requests.chat_prompt import chat_prompt
from services.gateway.chat.requests.json_body import served_name
from services.gateway.chat.requests.parse import Limits
from services.gateway.http.account import owner_of
from services.gateway.http.admission import Reservation
from services.gateway.http.body import Body, BodyParser
from services.gateway.http.failures import ErrorShape
from services.gateway.http.json_reply import json_response
from services.gateway.http.request_id import check_request_id, request_id
from services.gateway.http.violations import client_names
from services.gateway.mesh.job import Job, Prompt, chat_bytes
from shared.wire.messages import ChatOptions, ModelInfo

MESSAGES = "/v1/messages"
VERSION = "Anthropic-Version"
REQUEST_ID = "Request-Id"


def is_anthropic(request: web.BaseRequest) -> bool:
    """Recognized by the path, or by the header that Anthropic's clients always send."""
    path = request.path
    return path == MESSAGES or path.startswith(f"{MESSAGES}/") or VERSION in request.headers


async def name_message(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Adds the request's id in the header that Anthropic's clients read."""
    if is_anthropic(request):
        response.headers[REQUEST_ID] = request_id(request)


class CountedPrompt(NamedTuple):
    """``places`` are the client's names of parts of the chat."""

    prompt: Prompt
    options: ChatOptions
    places: dict[str, str]


class MessagesEndpoint:
    """How one request is read and answered."""

    format = ChatFormat()

    def __init__(self) -> None:
        self._shows_thinking = True

    def reply_id(self, request_id: str) -> str:
        return ID_PREFIX + request_id

    async def job(self, body: Body, model: ModelInfo, limits: Limits, parser: BodyParser) -> Job:
        parsed = await parser.parse(body, lambda body: parse_messages(body, model, limits))
        self._shows_thinking = parsed.shows_thinking
        return parsed.job

    def stream_writer(self, reply: Reply, parsers: Sequence[ChoiceParser]) -> MessageEvents:
        [parser] = parsers
        return MessageEvents(reply, parser, self._shows_thinking)

    def body_writer(self, reply: Reply, parsers: Sequence[ChoiceParser]) -> WholeMessage:
        [parser] = parsers
        return WholeMessage(reply, parser, self._shows_thinking)

    async def answer_early(self, request_id: str, job: Job, model: ModelInfo) -> None:
        """Its replies are made at once."""

    async def keep(self) -> None:
        """Nothing is kept."""


class Messages(Api):
    generating_routes = (MESSAGES,)
    id_prefixes = (ID_PREFIX,)
    error_shape = ErrorShape(is_anthropic, anthropic_status, anthropic_error)
    prepare = staticmethod(name_message)

    def __init__(self, core: Core) -> None:
        self._mesh = core.mesh
        self._intake = core.intake
        self._completions = core.completions
        self._structure = core.structure
        self._media = core.media

    def models(self, request: web.Request, served: Sequence[Model]) -> objects.ModelList | None:
        if not is_anthropic(request):
            return None
        models = [_model(model) for model in served]
        return objects.ModelList(models, models[0].id, models[-1].id)

    def model(self, request: web.Request, model: Model) -> objects.Model | None:
        return _model(model) if is_anthropic(request) else None

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(MESSAGES, self._create),
            web.post(f"{MESSAGES}/count_tokens", self._count_tokens),
        ]

    async def _create(self, request: web.Request) -> web.StreamResponse:
        return await self._completions.serve(request, MessagesEndpoint())

    async def _count_tokens(self, request: web.Request) -> web.Response:
        """The number of tokens that the same prompt has in a message."""
        check_request_id(request)
        with self._intake.admission.admit() as reservation:
            prompt, options, places = await self._prompt(request, reservation)
            owner = owner_of(request)
            with client_names(places):
                [prompt] = await self._media.loaded([prompt], owner, reservation)
                ids = await self._mesh.conversions.convert(owner, prompt, False, options)
            return json_response(TokenCount(len(ids)))

    async def _prompt(self, request: web.Request, reservation: Reservation) -> CountedPrompt:
        counted, _ = await self._intake.parsed(
            request,
            reservation,
            self._counted_prompt,
            lambda counted: counted.prompt.num_bytes + chat_bytes(counted.options),
        )
        reservation.is_served = True
        return counted

    def _counted_prompt(self, body: Body, model: ModelInfo) -> CountedPrompt:
        """Raises InvalidRequest (NotFound for the model)."""
        chat, _, places = parse_prompt(body, model, self._media)
        served_name(chat.model, model)
        tools = self._structure.tools(chat, model)
        with client_names(places):
            prompt = chat_prompt(chat, self._media, model)
        return CountedPrompt(prompt, chat_options(chat, tools.tools), places)


def _model(model: Model) -> objects.Model:
    created_at = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    limit = model.max_model_len
    return objects.Model(model.id, model.id, created_at, limit, limit)
