"""Turns the events of a text into output items and the events of a stream. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from services.gateway.apis.responses.replies.objects import ItemStatus, OutputItem
from services.gateway.apis.responses.replies.open_items import (
    ItemEvent,
    OpenCustomCall,
    OpenFunctionCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
)
from services.gateway.apis.responses.requests.tools import ItemTools
from services.gateway.chat.replies.choice_parser import CallStart, Content, Event, Reasoning


@dataclass(frozen=True)
class ItemShape:
    """The client's form of items: the kind of each of its ``tools``, whether reasoning
    ``is_summary``, and the function that makes ``encrypt``ed content, if requested. ``key`` makes
    the ids of items unique."""

    key: str
    tools: ItemTools
    is_summary: bool
    encrypt: Callable[[str], str] | None


class OutputItems:
    """The same events of a text make the same items, however they are grouped. ``items`` are the
    ended ones."""

    def __init__(self, shape: ItemShape) -> None:
        self.items: list[OutputItem] = []
        self._shape = shape
        self._open: OpenItem | None = None

    def add(self, event: Event, logprobs: Sequence[bytes] = ()) -> Iterator[ItemEvent]:
        """``logprobs``, entries as JSON, belong to the text of ``event``."""
        if isinstance(event, CallStart):
            yield from self._begin(self._new_call(event))
            return
        if isinstance(event, Content) and not isinstance(self._open, OpenMessage):
            yield from self._begin(OpenMessage(self._new_id("msg")))
        elif isinstance(event, Reasoning) and not isinstance(self._open, OpenReasoning):
            shape, item_id = self._shape, self._new_id("rs")
            yield from self._begin(OpenReasoning(item_id, shape.is_summary, shape.encrypt))
        assert self._open is not None
        yield from self._placed(self._open.push(event.text, logprobs))

    def finish(self, is_cut: bool) -> Iterator[ItemEvent]:
        """The text has ended. A whole reply has at least one item, possibly an empty message."""
        if not self.items and self._open is None and not is_cut:
            yield from self._begin(OpenMessage(self._new_id("msg")))
        yield from self._end("incomplete" if is_cut else "completed")

    def _new_call(self, start: CallStart) -> OpenItem:
        tools = self._shape.tools
        if start.name in tools.custom:
            return OpenCustomCall(self._new_id("ctc"), start)
        origin = tools.in_namespaces.get(start.name)
        return OpenFunctionCall(self._new_id("fc"), start, origin)

    def _new_id(self, prefix: str) -> str:
        number = len(self.items) + (self._open is not None)
        return f"{prefix}_{self._shape.key}{number:03x}"

    def _begin(self, item: OpenItem) -> Iterator[ItemEvent]:
        yield from self._end("completed")
        self._open = item
        yield from self._placed(item.open())

    def _end(self, status: ItemStatus) -> Iterator[ItemEvent]:
        if (item := self._open) is not None:
            events = [*item.close(status)]
            yield from self._placed(events)
            self.items.append(events[-1][1]["item"])
            self._open = None

    def _placed(self, events: Iterable[ItemEvent]) -> Iterator[ItemEvent]:
        assert self._open is not None
        index, item_id = len(self.items), self._open.id
        for kind, fields in events:
            place = {"output_index": index}
            yield kind, place | ({} if "item" in fields else {"item_id": item_id}) | fields
