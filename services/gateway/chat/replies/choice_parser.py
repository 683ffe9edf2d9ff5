"""Turns the text of a choice into events: content, reasoning and calls, piece by piece."""

from typing import Protocol

import msgspec

from services.gateway.mesh.output_collector import ChoiceUpdate
from shared.wire.messages import Finished


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """Call number ``index`` of the choice begins; its arguments follow."""

    index: int
    id: str
    name: str


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of the JSON of the arguments of call ``index``; never empty."""

    index: int
    text: str


Event = Reasoning | Content | CallStart | Arguments


class ChoiceParser(Protocol):
    """The events of one choice, as its updates come."""

    @property
    def is_over(self) -> bool:
        """Whether the rest, possibly long, is not needed."""

    @property
    def has_open_call(self) -> bool:
        """Whether the last call is unfinished."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Valid once the choice has ended; None: the number is not known."""

    def push(self, update: ChoiceUpdate) -> tuple[list[Event], ChoiceUpdate]:
        """Also returns ``update`` as the reply counts it."""

    def finish_reason(self, finished: Finished) -> str: ...


class PlainParser:
    """A ChoiceParser without state: all text is content."""

    is_over = False
    has_open_call = False
    num_reasoning_tokens = None

    def push(self, update: ChoiceUpdate) -> tuple[list[Event], ChoiceUpdate]:
        return [Content(update.text)] if update.text else [], update

    def finish_reason(self, finished: Finished) -> str:
        return finished.reason
