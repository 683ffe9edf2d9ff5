"""Replies as messages with headers: harmony's, with channels, and Muse Glimmer's."""

import json
import re
from abc import ABC, abstractmethod

from services.gateway.text.calls import Calls
from services.gateway.text.context import CallContext
from services.gateway.text.reasoning_count import ReasoningCount
from services.gateway.text.source import Waiting
from shared.dialects.formats import AddressedLayout, HarmonyLayout, ToolFormat
from shared.wire.messages import OutputStart

_RECIPIENT = re.compile(r"to=(\S+)")


class MessagesReply(ABC):
    """``markers`` are all of a frame; the one after a header is ``message``."""

    def __init__(
        self,
        context: CallContext,
        count: ReasoningCount,
        markers: tuple[str, ...],
        message: str,
    ) -> None:
        self._source = context.source
        self._out = context.out
        self._count = count
        self._markers = context.markers(*markers)
        self._message = message
        self._recipient = context.markers("to=")

    def read(self, start: OutputStart) -> Waiting[None]:
        if start == OutputStart.REASONING:
            self._count.begin(-1)
            marker = yield from self._read_reasoning()
        elif start == OutputStart.ANSWER or not (yield from self._begins_with_header()):
            marker = yield from self._read_content()
        else:
            marker = ""
        while marker is not None:
            marker = yield from self._read_message(marker)

    def _begins_with_header(self) -> Waiting[bool]:
        """The prompt ends inside a header, so the output may begin with a recipient or a marker."""
        self._source.record()
        yield from self._source.skip_blanks()
        if (yield from self._source.at(self._markers)) or (
            yield from self._source.at(self._recipient)
        ):
            self._source.recorded()
            return True
        self._out.content(self._source.recorded())
        return False

    def _read_message(self, marker: str) -> Waiting[str | None]:
        """A message after ``marker``; the marker that ends it."""
        header = [marker]
        while marker != self._message:
            text, following = yield from self._source.read(self._markers)
            if not text and following is None:
                return None
            marker = following or ""
            header.append(f" {marker} " if marker else text)
        found = _RECIPIENT.search("".join(header))
        return (yield from self._read_body("".join(header), found.group(1) if found else ""))

    @abstractmethod
    def _read_body(self, header: str, recipient: str) -> Waiting[str | None]:
        """The body of a message; the marker that ends it."""

    def _read_reasoning(self) -> Waiting[str | None]:
        while True:
            text, marker = yield from self._source.read(self._markers)
            self._out.reasoning(text)
            if marker is not None:
                self._count.end(self._source.index)
                self._out.end_reasoning()
            if marker is not None or not text:
                return marker

    def _read_content(self) -> Waiting[str | None]:
        while True:
            text, marker = yield from self._source.read(self._markers)
            self._out.content(text)
            if marker is not None or not text:
                return marker


class HarmonyReply(MessagesReply):
    """In channels, as gpt-oss writes them. ``has_reasoning``, ``has_calls``: whether they are
    separated from content."""

    def __init__(
        self,
        context: CallContext,
        count: ReasoningCount,
        *,
        has_reasoning: bool,
        has_calls: bool,
    ) -> None:
        layout = self._layout = HarmonyLayout()
        header = (layout.start, layout.channel, layout.constrain, layout.message)
        ends = (layout.end, layout.end_of_calls, layout.end_of_reply)
        super().__init__(context, count, (*header, *ends), layout.message)
        self._has_reasoning = has_reasoning
        self._has_calls = has_calls

    def _read_body(self, header: str, recipient: str) -> Waiting[str | None]:
        if self._has_calls and recipient.startswith(self._layout.recipient_open):
            name = recipient.removeprefix(self._layout.recipient_open)
            return (yield from self._read_call(name))
        channel = header.partition(self._layout.channel)[2].split()
        if self._has_reasoning and channel[:1] == ["analysis"]:
            self._count.begin(self._source.index)
            return (yield from self._read_reasoning())
        return (yield from self._read_content())

    def _read_call(self, name: str) -> Waiting[str | None]:
        """A call ends in a marker, or with the text if its arguments are complete."""
        self._out.start_call(name)
        yield from self._source.skip_blanks()
        pieces: list[str] = []
        while True:
            text, marker = yield from self._source.read(self._markers)
            self._out.arguments(text)
            pieces.append(text)
            if marker is not None or (not text and _is_object("".join(pieces))):
                self._out.end_call()
            if marker is not None or not text:
                return marker


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


ITSELF, USER = "self", "user"  # recipients that are no functions


class AddressedReply(MessagesReply):
    """To recipients, as Muse Glimmer writes them. Without ``tools`` or ``has_reasoning`` these
    parts are content."""

    def __init__(
        self,
        context: CallContext,
        count: ReasoningCount,
        tools: ToolFormat | None,
        *,
        has_reasoning: bool,
    ) -> None:
        layout = AddressedLayout()
        self._frame = layout.start, layout.message, layout.end, layout.end_of_reply
        super().__init__(context, count, self._frame, layout.message)
        self._calls = Calls(context, tools) if tools is not None else None
        markers = () if self._calls is None else sorted(self._calls.markers)
        self._in_call = context.markers(*self._frame, *markers)
        self._has_reasoning = has_reasoning

    def _read_body(self, header: str, recipient: str) -> Waiting[str | None]:
        if self._has_reasoning and recipient == ITSELF:
            self._count.begin(self._source.index)
            return (yield from self._read_reasoning())
        if self._calls is not None and recipient not in ("", ITSELF, USER):
            return (yield from self._read_calls(self._calls))
        return (yield from self._read_content())

    def _read_calls(self, calls: Calls) -> Waiting[str | None]:
        """The message of a function; calls quoted in another one are text."""
        while True:
            text, marker = yield from self._source.read(self._in_call)
            self._out.content(text)
            if marker in calls.markers:
                yield from calls.read(marker)
            elif marker is not None or not text:
                return marker
