"""Structure of chats: tools in the request, reasoning and calls in the output."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from services.gateway.chat.replies.choice_parser import ChoiceParser, PlainParser
from services.gateway.chat.requests.json_body import json_errors, plain
from services.gateway.chat.requests.schema import ChatRequest
from services.gateway.chat.requests.unsupported import Neutral, refuse_unsupported
from services.gateway.mesh.job import Job, Parsing
from services.gateway.mesh.token_table import TokenTable
from shared.wire.messages import ModelInfo, OutputStart, ToolChoice

_WITHOUT: Neutral = {
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "separate_reasoning": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


@dataclass(frozen=True, slots=True)
class Tools:
    """``tools`` is the JSON array for the chat template; empty: there are none.

    ``is_named``: the client wants a call of one function, which it names. ``is_legacy``: it sent
    OpenAI's older fields and reads the older ones of a reply.
    """

    tools: str = ""
    choice: ToolChoice | None = None
    is_named: bool = False
    is_legacy: bool = False


class Structure(Protocol):
    """An optional part of the gateway; without it, NoStructure stands in."""

    def tools(self, request: ChatRequest, model: ModelInfo) -> Tools:
        """Raises InvalidRequest."""

    def parsing(self, request: ChatRequest, tools: Tools, model: ModelInfo) -> Parsing | None:
        """None: all of the output is content."""

    def parsers(
        self,
        job: Job,
        parsing: Parsing,
        table: TokenTable,
        starts: Sequence[OutputStart],
        seed: str,
    ) -> Sequence[ChoiceParser]:
        """One parser for each choice; ``starts`` are the output starts of the prompts, ``seed``
        makes the ids of calls unique to this reply."""


class NoStructure:
    """Refuses tools and the separation of reasoning."""

    @json_errors()
    def tools(self, request: ChatRequest, model: ModelInfo) -> Tools:
        """Raises InvalidRequest."""
        fields = {name: _value(getattr(request, name)) for name in _WITHOUT}
        refuse_unsupported(fields, _WITHOUT)
        return Tools()

    def parsing(self, request: ChatRequest, tools: Tools, model: ModelInfo) -> Parsing | None:
        return None

    def parsers(
        self,
        job: Job,
        parsing: Parsing,
        table: TokenTable,
        starts: Sequence[OutputStart],
        seed: str,
    ) -> Sequence[ChoiceParser]:
        return [PlainParser()] * job.total_choices


def _value(field: object) -> object:
    return plain(field) if isinstance(field, msgspec.Raw) else msgspec.to_builtins(field)
