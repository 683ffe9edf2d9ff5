"""The parts of an endpoint that generates texts; ``completions.py`` has the common rest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from services.gateway.chat.replies.choice_parser import ChoiceParser
from services.gateway.chat.replies.formats import ChatFormat, Format, TextFormat
from services.gateway.chat.replies.reply import Reply
from services.gateway.chat.replies.writers import (
    BodyWriter,
    EventWriter,
    StreamWriter,
    WholeWriter,
)
from services.gateway.chat.requests.parse import Limits, parse_chat, parse_completion
from services.gateway.http.body import Body, BodyParser
from services.gateway.mesh.job import Job
from shared.wire.messages import ModelInfo


class GenerationEndpoint(Protocol):
    """How one kind of request is read and answered."""

    @property
    def format(self) -> Format: ...

    def reply_id(self, request_id: str) -> str: ...

    async def job(self, body: Body, model: ModelInfo, limits: Limits, parser: BodyParser) -> Job:
        """Raises RequestError."""

    def stream_writer(self, reply: Reply, parsers: Sequence[ChoiceParser]) -> StreamWriter: ...

    def body_writer(self, reply: Reply, parsers: Sequence[ChoiceParser]) -> BodyWriter: ...

    async def answer_early(
        self, request_id: str, job: Job, model: ModelInfo
    ) -> web.Response | None:
        """The whole answer, if the reply is made later. Raises RequestError."""

    async def keep(self) -> None:
        """Called after the last token, before the end of the reply is sent. Raises RequestError."""


@dataclass(frozen=True)
class CompletionEndpoint:
    """One of OpenAI's two older endpoints."""

    id_prefix: str
    parse: Callable[[Body, ModelInfo, Limits], Job]
    format: Format

    def reply_id(self, request_id: str) -> str:
        return self.id_prefix + request_id

    async def job(self, body: Body, model: ModelInfo, limits: Limits, parser: BodyParser) -> Job:
        return await parser.parse(body, lambda body: self.parse(body, model, limits))

    def stream_writer(self, reply: Reply, parsers: Sequence[ChoiceParser]) -> StreamWriter:
        return EventWriter(reply, parsers)

    def body_writer(self, reply: Reply, parsers: Sequence[ChoiceParser]) -> BodyWriter:
        return WholeWriter(reply, parsers)

    async def answer_early(self, request_id: str, job: Job, model: ModelInfo) -> None:
        """Its replies are made at once."""

    async def keep(self) -> None:
        """Nothing is kept."""


CHAT = CompletionEndpoint("chatcmpl-", parse_chat, ChatFormat())
TEXT = CompletionEndpoint("cmpl-", parse_completion, TextFormat())
