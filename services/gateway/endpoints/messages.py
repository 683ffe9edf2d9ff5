"""``/v1/messages`` and ``/v1/messages/count_tokens``, in Anthropic's shape."""

from aiohttp import web

from services.gateway.endpoints.completions import Completions
from services.gateway.endpoints.intake import Intake
from services.gateway.http.account import owner_of
from services.gateway.http.admission import Reservation
from services.gateway.http.anthropic import MESSAGES
from services.gateway.http.body import BodyParser
from services.gateway.mesh.mesh import Mesh
from services.gateway.requests.chat_options import chat_options
from services.gateway.requests.job import Job, Prompt, chat_bytes
from services.gateway.requests.json_body import Body, served_name
from services.gateway.requests.messages.parse import parse_messages, parse_prompt
from services.gateway.requests.parse import Limits
from services.gateway.requests.prompts import chat_prompt
from services.gateway.requests.request_id import check_request_id
from services.gateway.requests.tools import requested_tools
from services.gateway.responses.anthropic import TokenCount
from services.gateway.responses.formats import ChatFormat
from services.gateway.responses.json_reply import json_response
from services.gateway.responses.message_writers import ID_PREFIX, MessageEvents, WholeMessage
from services.gateway.responses.output_parser import OutputParser
from services.gateway.responses.reply import Reply
from shared.messages import ChatOptions, ModelInfo


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

    def stream_writer(self, reply: Reply, parser: OutputParser | None) -> MessageEvents:
        assert parser is not None
        return MessageEvents(reply, parser, self._shows_thinking)

    def body_writer(self, reply: Reply, parser: OutputParser | None) -> WholeMessage:
        assert parser is not None
        return WholeMessage(reply, parser, self._shows_thinking)

    async def answer_early(self, request_id: str, job: Job, model: ModelInfo) -> None:
        """Its replies are made at once."""

    async def keep(self) -> None:
        """Nothing is kept."""


class Messages:
    """``completions`` serves what is generated."""

    def __init__(self, mesh: Mesh, intake: Intake, completions: Completions) -> None:
        self._mesh = mesh
        self._intake = intake
        self._completions = completions

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(MESSAGES, self._create),
            web.post(f"{MESSAGES}/count_tokens", self._count_tokens),
        ]

    async def _create(self, request: web.Request) -> web.StreamResponse:
        return await self._completions.serve(request, MessagesEndpoint())

    async def _count_tokens(self, request: web.Request) -> web.Response:
        """What the same prompt counts as when a message is made of it."""
        check_request_id(request)
        with self._intake.admission.admit() as reservation:
            prompt, options = await self._prompt(request, reservation)
            ids = await self._mesh.conversions.convert(
                owner_of(request), prompt.kind, prompt.data, False, options
            )
            return json_response(TokenCount(len(ids)))

    async def _prompt(
        self, request: web.Request, reservation: Reservation
    ) -> tuple[Prompt, ChatOptions]:
        (prompt, options), _ = await self._intake.parsed(
            request,
            reservation,
            counted_prompt,
            lambda counted: counted[0].data.nbytes + chat_bytes(counted[1]),
        )
        reservation.is_served = True
        return prompt, options


def counted_prompt(body: Body, model: ModelInfo) -> tuple[Prompt, ChatOptions]:
    """Raises InvalidRequest (NotFound for the model)."""
    chat = parse_prompt(body, model)
    served_name(chat.model, model)
    tools = requested_tools(chat, model)
    return chat_prompt(chat.messages), chat_options(chat, tools.tools)
