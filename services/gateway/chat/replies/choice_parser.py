"""From the text of a choice to events."""

from typing import Protocol

from services.gateway.chat.replies.events import Content, Event
from services.gateway.mesh.output_collector import ChoiceUpdate
from shared.wire.messages import Finished


class ChoiceParser(Protocol):
    """The events of one choice, as its updates come."""

    @property
    def is_over(self) -> bool:
        """Whether the rest is of no interest; there may be much of it."""

    @property
    def has_open_call(self) -> bool:
        """Whether the last call has not come to its end."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Once the choice has ended; None: the number is not known."""

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
